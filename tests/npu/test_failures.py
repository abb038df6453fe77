"""The real wheel where something is missing: our errors in place of torch_npu's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.device_failures import CODES
from tests.npu.wheel import FakeNpu

pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]
# Opens each device named in the arguments under its variables, and prints the name or the error's message and hint.
OPEN = """
import functools, json, sys
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.devices import open_backend
from tests.npu.inside import in_fork

def opened(name):
    try:
        return open_backend(name).name
    except DeviceError as error:
        return error.message, error.hint

attempts = json.loads(sys.argv[1])
print(json.dumps([in_fork(functools.partial(opened, name), **variables) for name, variables in attempts]))
"""


def open_devices(npu: FakeNpu, *attempts: tuple[str, dict[str, str]], with_cann: bool = True) -> list[Any]:
    outcome = npu.run("-c", OPEN, json.dumps(attempts), with_cann=with_cann)
    assert outcome.code == 0, outcome.stderr
    return json.loads(outcome.stdout)  # and nothing else was printed there


def test_without_the_libraries_of_cann_auto_is_the_cpu(npu: FakeNpu) -> None:
    (message, hint), auto = open_devices(npu, ("npu:0", {}), ("auto", {}), with_cann=False)

    assert "the libraries of CANN are not found (ImportError: libhccl.so: cannot open shared object file" in message
    assert "set_env.sh" in hint
    assert auto == "cpu"


def test_a_missing_or_empty_home_of_cann_and_a_machine_without_a_device(npu: FakeNpu, tmp_path: Path) -> None:
    soc, empty_home = {"FAKE_SOC": "Ascend310P3"}, {"ASCEND_HOME_PATH": str(tmp_path), "ASCEND_OPP_PATH": str(tmp_path)}
    (missing, _), (empty, _), (none, hint), auto = open_devices(
        npu,
        ("npu:0", {**soc, "ASCEND_HOME_PATH": "/nowhere/cann"}),
        ("npu:0", {**soc, **empty_home}),
        ("npu:0", {}),
        ("auto", soc),
    )

    assert "ASCEND_HOME_PATH : /nowhere/cann does not exist" in missing
    assert "runtime" in empty
    assert missing.partition("(")[0] == empty.partition("(")[0]
    assert "no NPU is" in none
    assert "npu-smi info" in hint
    assert "--device cpu" in hint
    assert auto == "npu:0 (Ascend310P3)"


LOAD = """
import contextlib, json, sys
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.runtime.devices import open_best
from tests.npu.inside import in_fork
from tests.npu.inside.host_ops import HostOps

def loaded():
    backend, _ = open_best()
    with HostOps() if backend.device.type == "npu" else contextlib.nullcontext():
        info = Captioner.load().info
    return info.device, info.dtype, info.notes[0]

print(json.dumps([in_fork(loaded, FAKE_SOC=soc) for soc in sys.argv[1:]]))
"""


def test_without_flags_a_model_is_on_the_chip_in_its_best_dtype(npu: FakeNpu) -> None:
    best = {"Ascend310P3": "float16", "Ascend910B3": "bfloat16"}
    for (device, given, note), (soc, dtype) in zip(npu.run("-c", LOAD, *best).report(), best.items(), strict=True):
        assert (device, given) == (f"npu:0 ({soc})", dtype)
        assert note == f"computing on npu:0 ({soc}) in {dtype}: the first accelerator; the best type of this device"


def test_without_cann_a_model_is_on_the_cpu_and_that_is_told(npu: FakeNpu) -> None:
    ((device, dtype, note),) = npu.run("-c", LOAD, "", with_cann=False).report()

    assert (device, dtype) == ("cpu", "float32")
    assert note.startswith("computing on cpu in float32: torch_npu ")
    assert "the libraries of CANN are not found" in note


def test_torch_does_not_import_beside_torch_npu_without_cann_unless_loading_is_deferred(npu: FakeNpu) -> None:
    loaded = npu.run("-c", "import torch", with_cann=False, TORCH_DEVICE_BACKEND_AUTOLOAD="1")

    assert loaded.code != 0
    assert "Failed to load the backend extension: torch_npu" in loaded.stderr


WAIT = """
import contextlib, io, json, os, sys
from llama_adapter.app.terminal.run_guarded import run_guarded
from llama_adapter.runtime.devices import open_backend
backend = open_backend("npu:0")
told = {}
for error in sys.argv[1:]:
    os.environ["FAKE_ERROR"] = error
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run_guarded(lambda: backend.synchronise() or 0)
    told[error] = [code, said.getvalue()]
del os.environ["FAKE_ERROR"]
backend.synchronise()
print(json.dumps(told))
"""
AT_WORK = {
    "507015": ("An operator failed on the NPU", "--operators aten"),
    "107002": ("The thread's context on the NPU is gone", "--encoder-process"),
    "207001": ("The memory of the NPU is not enough", "--batch-size"),
    "999999": ("The NPU failed", "npu-smi info"),
}


@pytest.fixture(scope="module")
def failed_at_work(npu: FakeNpu) -> dict[str, tuple[int, str]]:
    """Exit code and words for each error of the runtime, one after another."""
    return npu.run("-c", WAIT, *AT_WORK, soc="Ascend910B3").report()


@pytest.mark.parametrize("code", AT_WORK)
def test_an_error_of_a_running_device_has_its_code(failed_at_work: dict[str, tuple[int, str]], code: str) -> None:
    ended, said = failed_at_work[code]
    told, _, hints = said.partition("error: ")[2].partition("\n\nhint: ")
    sentence, hint = AT_WORK[code]

    assert ended == 1
    assert told.startswith(sentence)
    assert f"error code is {code}" in told
    assert hint in hints


def test_our_codes_of_the_runtime_are_in_its_header(npu: FakeNpu) -> None:
    header = npu.wheel / "torch_npu" / "include" / "acl" / "error_codes" / "rt_error_codes.h"
    defined = set(map(int, re.findall(r"(?:_RT|ACL_ERROR_STREAM)_\w+\s+(\d{6})\b", header.read_text())))

    assert {code for code in CODES if code // 1000 in (107, 207, 507)} <= defined
