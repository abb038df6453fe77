"""The real torch_npu and onnxruntime-cann, each in its own folder, and a way to run programs on the fake CANN.

torch_npu must never be on the path of the tests' own process, because with it `import torch` fails wherever CANN is
missing.
"""

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.npu import fake_cann

ROOT = Path(__file__).resolve().parents[2]
VERSION = "2.13.0"
FOLDER = ROOT / ".venv" / f"torch-npu-{VERSION}"
ORT_VERSION = "1.24.4"
ORT_FOLDER = ROOT / ".venv" / f"onnxruntime-cann-{ORT_VERSION}"
CACHE = ROOT / ".pytest_cache" / "npu"
GIVEN = "LLAMA_ADAPTER_TORCH_NPU"  # a folder that contains the unpacked wheel
DOWNLOAD_S = 240
RUN_S = 900  # generous: on a busy machine, one process tries all chips, or a whole `doctor` runs
# One chip of each family, as a value of `FAKE_SOC`. The whole model runs on the first three, which takes longer.
CHIPS = ("Ascend310P3", "Ascend910B3", "Ascend910A", "Ascend310B1", "Ascend910_9391", "Ascend950PR_9599")
WHOLE_MODEL = CHIPS[:3]
SOC = CHIPS[1]  # the chip of tests that need only one


class UnavailableError(Exception):
    """torch_npu does not fit this machine's system, Python or torch; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program that has ended."""

    code: int
    stdout: str
    stderr: str

    def report(self) -> Any:
        """The JSON in the last line of stdout."""
        assert self.code == 0, self.stderr[-3000:]
        return json.loads(self.stdout.strip().splitlines()[-1])


@dataclass(frozen=True, slots=True)
class FakeNpu:
    """A wheel, and the libraries that stand in for CANN."""

    wheel: Path
    libraries: Path

    def run(
        self, *arguments: str, soc: str | None = None, with_cann: bool = True, **environment: str | None
    ) -> Outcome:
        """Run `python <arguments>` with torch_npu; without `soc` there is no device, without CANN no libraries.

        `environment` adds variables; a value of None removes one.
        """
        variables: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": f"{self.wheel}{os.pathsep}{ROOT}",
            "LD_LIBRARY_PATH": str(self.libraries) if with_cann else None,
            "FAKE_SOC": soc,
            "ASCEND_HOME_PATH": None,
            "TASK_QUEUE_ENABLE": "0",  # torch_npu must not queue, because kernels run on the host in between
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # set like this by the command line
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    @functools.cache  # noqa: B019 - there is one for the whole session
    def reports(self) -> Any:
        """The JSON printed by tests/npu/inside: reports by chip, and "wheel", "graphs" and "profiled"."""
        return self.run("-m", "tests.npu.inside").report()


@functools.cache
def fake_npu() -> FakeNpu:
    """torch_npu on the fake CANN; it is downloaded and built at the first use.

    Raises UnavailableError if no wheel fits. A failed download of the wheel, or a failed build of the fake CANN, is an
    error of the tests.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise UnavailableError(f"torch_npu has no wheel for {sys.platform} on {platform.machine()}")
    if torch.__version__.split(".")[:2] != VERSION.split(".")[:2]:
        raise UnavailableError(f"torch_npu {VERSION} does not go with torch {torch.__version__}")
    if other := torch.version.cuda or torch.version.hip:
        raise UnavailableError(f"torch_npu refuses a torch built for another accelerator ({other})")
    wheel = _wheel()
    if not list((wheel / "torch_npu").glob(f"_C.cpython-3{sys.version_info.minor}-*.so")):
        raise UnavailableError(f"the torch_npu in {wheel} is for another Python")
    folders = [wheel / "torch_npu" / name for name in (".", "lib", "dynamo/torchair/core")]
    libraries = [library for folder in folders for library in sorted(folder.glob("*.so"))]
    return FakeNpu(wheel, fake_cann.build(libraries, cache=CACHE))


@functools.cache
def onnxruntime_cann() -> FakeNpu:
    """The real onnxruntime-cann and numpy 1, which it needs, on the fake CANN. Raises the errors of `fake_npu`."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise UnavailableError(f"onnxruntime-cann has no wheel for {sys.platform} on {platform.machine()}")
    if sys.version_info >= (3, 13):
        raise UnavailableError("onnxruntime-cann needs numpy 1, which has no wheel for this Python")
    if not ORT_FOLDER.is_dir():
        _download(ORT_FOLDER, f"onnxruntime-cann=={ORT_VERSION}", "numpy==1.26.4")
    library = ORT_FOLDER / "onnxruntime" / "capi" / "libonnxruntime_providers_cann.so"
    return FakeNpu(ORT_FOLDER, fake_cann.build([library], cache=CACHE))


def _wheel() -> Path:
    if given := os.environ.get(GIVEN):
        if not (Path(given) / "torch_npu").is_dir():
            raise RuntimeError(f"{GIVEN} is {given}, and there is no torch_npu in it")
        return Path(given)
    if not FOLDER.is_dir():
        _download(FOLDER, f"torch-npu=={VERSION}")
    return FOLDER


def _download(folder: Path, *packages: str) -> None:
    started = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--retries", "1"]
    command += ["--disable-pip-version-check", "--target", str(started), *packages]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=True)
        with suppress(OSError):  # another process was faster
            started.rename(folder)
        assert folder.is_dir()
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{', '.join(packages)} cannot be fetched: {error.stderr}") from error
    finally:
        shutil.rmtree(started, ignore_errors=True)
