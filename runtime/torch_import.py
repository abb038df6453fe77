"""Environment variables to set before torch is imported, and explanations of a failed import. Imports no torch."""

import os
import re

from llama_adapter.runtime.host_cpus import cpu_quota, usable_cpus
from llama_adapter.runtime.text import one_line

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"

# Messages of torch: from `_import_device_backends` in torch/__init__.py, and from the dispatcher at a second import.
_FAILED_EXTENSION = re.compile(r"Failed to load the backend extension: (\S+)\. ")
_SECOND_IMPORT = "Only a single TORCH_LIBRARY can be used to register the namespace"


def decline_telemetry() -> None:
    """Keep onnxruntime (since 1.31 on Linux) from recording how it is used in the home folder."""
    os.environ.setdefault(NO_TELEMETRY, "1")


def prepare_imports() -> None:
    """Set variables of torch, of its libraries and of onnxruntime, except those that the user has set.

    Call this before anything imports torch or onnxruntime.
    """
    # Device extensions are not imported with torch: if one lacks its vendor's libraries, torch could not be imported at
    # all, even for the CPU. Opening a device imports its extension.
    os.environ.setdefault(AUTOLOAD, "0")
    decline_telemetry()
    # Idle threads of torch sleep after about 10 microseconds. By default, libgomp's threads spin for milliseconds. If
    # one other process is busy, a caption of the samples then takes five times as long, because spinning threads hold
    # the processors that other threads need. On an idle machine both settings take the same time. Threads that sleep at
    # once (OMP_WAIT_POLICY=passive) take 1.7 times as long there.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if cpu_quota() is not None:  # torch counts the machine's processors, whatever the quota is
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler prints its steps on stderr


def explain_torch_import(error: BaseException) -> tuple[str, str] | None:
    """A sentence and a hint if `import torch` failed because of a device extension; None for every other error."""
    if not isinstance(error, RuntimeError):
        return None
    if (failed := _FAILED_EXTENSION.match(str(error))) is not None:
        name = failed[1]
        reason = (
            "" if error.__cause__ is None else f": {type(error.__cause__).__name__}: {one_line(str(error.__cause__))}"
        )
        return (
            f"torch cannot be imported, because its extension `{name}` fails{reason}",
            f"for that device, source the `set_env.sh` of its toolkit (CANN); to use torch without it, set "
            f"{AUTOLOAD}=0; or `pip uninstall {name}`; then start again, in a new process",
        )
    if _SECOND_IMPORT in str(error):
        return (
            "torch cannot be imported a second time in one process, after its first import failed",
            f"the first error says why; start again, in a new process, with {AUTOLOAD}=0 set if it was an extension",
        )
    return None


def note_torch_import(error: BaseException) -> None:
    """Add the explanation to the traceback of a failed `import torch`, for users of the library."""
    explained = explain_torch_import(error)
    if explained is not None:
        error.add_note("{}\n\nhint: {}".format(*explained))
