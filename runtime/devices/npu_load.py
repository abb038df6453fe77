"""Imports torch_npu, or explains in a sentence and a hint why that fails."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

import torch

from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.explanation import first_that_fits, read_explanations

OTHERWISE = "; or pass `--device cpu`"


def load_torch_npu() -> Any:
    """The imported module torch_npu. Raises DeviceError with torch_npu's message and a hint if the import fails."""
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceError(
            "torch_npu is not installed, and Ascend NPUs need it",
            hint="on Linux, install torch's CPU build, then the extra `npu`" + OTHERWISE,
        )
    _check_versions()
    try:
        # torch_npu prints warnings to stdout, which is reserved for answers.
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("torch_npu")
    except Exception as error:  # torch_npu raises many classes, plain Exception included
        raise explain_loading(error) from error


def _check_versions() -> None:
    """Raise DeviceError if torch_npu was made for another torch, before its libraries crash the process."""
    try:
        wanted = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return
    given = torch.__version__
    if wanted.split(".")[:2] != given.split(".")[:2]:
        raise DeviceError(
            f"torch_npu {wanted} is made for torch {'.'.join(wanted.split('.')[:3])}, and torch {given} is installed",
            hint="install the two in the same version" + OTHERWISE,
        )


def explain_loading(error: Exception) -> DeviceError:
    """The error for a failed `import torch_npu`; it quotes the first line of each cause."""
    causes = [error, *filter(None, [error.__cause__])]
    text = " / ".join(f"{type(cause).__name__}: {first_line(cause)}" for cause in causes)
    found = first_that_fits(read_explanations("torch_npu"), "\n".join(map(str, causes)))
    if found is not None:
        message = found[0].sentence.format(torch=torch.__version__)
        return DeviceError(f"{message} ({text})", hint=found[0].hint + OTHERWISE)
    return DeviceError(
        f"torch_npu cannot be imported ({text})",
        hint="`llama-adapter doctor` looks at the parts one by one" + OTHERWISE,
    )


def first_line(error: BaseException) -> str:
    """The first line of the error's text, or `no text`."""
    return (str(error).strip() or "no text").splitlines()[0]
