"""Imports torch_npu, or explains in a sentence and a hint why that fails."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

import torch

from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.explanation import Explanation, first_that_fits
from llama_adapter.runtime.graphs.toolkit import SET_ENV

OTHERWISE = "; or pass `--device cpu`"

# The first match is used. The patterns are messages of torch_npu 2.13 and of the dynamic linker.
FAILURES = (
    Explanation(
        r"ERR00007|Two accelerators cannot be used",
        "torch_npu refuses this torch, which was built for another accelerator",
        "install torch's CPU build of the same version from the PyTorch CPU index, then torch_npu",
    ),
    Explanation(
        r"undefined symbol|version `[^']+' not found",
        "torch_npu's libraries fit neither this torch ({torch}) nor this CANN",
        "install the pair of torch_npu and torch that torch_npu's compatibility table gives for your CANN",
    ),
    Explanation(
        r"lib\w+\.so[.\d]*: cannot open shared object file",
        "torch_npu is installed, but the libraries of CANN are not found",
        f"install CANN, or {SET_ENV} in this shell",
    ),
    Explanation(
        r"ASCEND_\w+_PATH",
        "The environment variables of CANN point to missing or incomplete folders",
        f"{SET_ENV} again, in a fresh shell and from the CANN that is installed",
    ),
    Explanation(
        r"Only a single TORCH_LIBRARY|already (?:been )?registered",
        "torch_npu failed to load earlier in this process, and cannot be loaded twice",
        "start again, and look at the first error",
    ),
    Explanation(
        r"No module named",
        "torch_npu is installed, but a Python package that it needs is not",
        "install the packages of the extra `npu`",
    ),
)


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
    found = first_that_fits(FAILURES, "\n".join(map(str, causes)))
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
