"""Loads torch_npu, and says in one sentence and a hint why it cannot be. The device itself is opened in npu.py."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from llama_adapter.runtime.errors import DeviceError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFailure:
    """A way in which `import torch_npu` fails: what its text looks like, and what helps."""

    pattern: str
    message: str
    hint: str


SOURCE_CANN = "source <CANN>/set_env.sh (cann/ or, up to 8.3, ascend-toolkit/)"
OTHERWISE = "; or pass `--device cpu`"

# The first that is found in the text counts. Texts of torch_npu 2.13 and of the dynamic linker.
FAILURES = (
    LoadFailure(
        pattern=r"ERR00007|Two accelerators cannot be used",
        message="torch_npu refuses this torch, which was built for another accelerator",
        hint="install torch's CPU build of the same version from the PyTorch CPU index, then torch_npu",
    ),
    LoadFailure(
        pattern=r"undefined symbol|version `[^']+' not found",
        message="torch_npu's libraries fit neither this torch ({torch}) nor this CANN",
        hint="install the pair of torch_npu and torch that torch_npu's compatibility table gives for your CANN",
    ),
    LoadFailure(
        pattern=r"lib\w+\.so[.\d]*: cannot open shared object file",
        message="torch_npu is installed, but the libraries of CANN are not found",
        hint=f"install CANN, or {SOURCE_CANN} in this shell",
    ),
    LoadFailure(
        pattern=r"ASCEND_\w+_PATH",
        message="The environment variables of CANN lead nowhere",
        hint=f"{SOURCE_CANN} again, in a fresh shell and from the CANN that is installed",
    ),
    LoadFailure(
        pattern=r"Only a single TORCH_LIBRARY|already (?:been )?registered",
        message="torch_npu failed to load earlier in this process, and cannot be loaded twice",
        hint="start again, and look at the first error",
    ),
    LoadFailure(
        pattern=r"No module named",
        message="torch_npu is installed, but a Python package that it needs is not",
        hint="install the packages of the extra `npu`",
    ),
)


def load_torch_npu() -> Any:
    """The module torch_npu, imported.

    Raises DeviceError with what to do for every way in which that fails. Its message ends with torch_npu's own words.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceError(
            "torch_npu is not installed, and Ascend NPUs need it",
            hint="on Linux, install torch's CPU build, then the extra `npu`" + OTHERWISE,
        )
    _check_versions()
    try:
        # It prints warnings to stdout, which is for answers.
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("torch_npu")
    except Exception as error:  # it raises whatever it likes, plain Exception included
        raise explain_loading(error) from error


def _check_versions() -> None:
    """Raise before loading a torch_npu made for another torch, whose libraries might take the process down."""
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
    """For an `import torch_npu` that failed; the message has torch_npu's own words, the first line of them."""
    causes = [error, *filter(None, [error.__cause__])]
    text = " / ".join(f"{type(cause).__name__}: {first_line(cause)}" for cause in causes)
    everything = "\n".join(map(str, causes))
    for failure in FAILURES:
        if re.search(failure.pattern, everything):
            message = failure.message.format(torch=torch.__version__)
            return DeviceError(f"{message} ({text})", hint=failure.hint + OTHERWISE)
    return DeviceError(
        f"torch_npu cannot be imported ({text})",
        hint="`llama-adapter doctor` looks at the parts one by one" + OTHERWISE,
    )


def first_line(error: BaseException) -> str:
    """The first line of its text, which may have dozens; `no text` where there is none."""
    return (str(error).strip() or "no text").splitlines()[0]
