"""The real wheel with missing parts: our errors appear in place of torch_npu's."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.device_failures import CODES
from tests.npu.wheel import FakeNpu

pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]
# Opens each device in the arguments with its variables, and prints the name, or the error's message and hint.
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
    return json.loads(outcome.stdout)  # fails if anything else was printed


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
    assert "there is no NPU" in none
    assert "npu-smi info" in hint
    assert "--device cpu" in hint
    assert auto == "npu:0 (Ascend310P3)"


# Loads a model on each chip in the arguments, and makes the last chip's device fail with each error. Each case is a
# fork of a process that has loaded torch_npu, if torch_npu can be loaded.
TRY = """
import contextlib, functools, io, json, os, sys
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from llama_adapter.runtime.devices import open_backend, open_best
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from tests.npu.inside import in_fork
from tests.npu.inside.host_ops import HostOps

def loaded():
    backend, _ = open_best()
    with HostOps() if backend.device.type == "npu" else contextlib.nullcontext():
        info = Captioner.load().info
    return info.device, info.dtype, info.notes[0]

def failed(errors):
    backend = open_backend("npu:0")
    told = {}
    for error in errors:
        os.environ["FAKE_ERROR"] = error
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = run_guarded(lambda: backend.synchronise() or 0)
        told[error] = [code, said.getvalue()]
    del os.environ["FAKE_ERROR"]
    backend.synchronise()
    return told

chips, errors = json.loads(sys.argv[1])
if chips != [""]:
    load_torch_npu()
models = [in_fork(loaded, FAKE_SOC=soc) for soc in chips]
told = in_fork(functools.partial(failed, errors), FAKE_SOC=chips[-1]) if errors else {}
print(json.dumps([models, told]))
"""
BEST = {"Ascend310P3": "float16", "Ascend910B3": "bfloat16"}
Tried = tuple[list[tuple[str, str, str]], dict[str, tuple[int, str]]]


@pytest.fixture(scope="module")
def tried(npu: FakeNpu) -> Tried:
    """Device, dtype and note of a model on each chip of `BEST`; exit code and message for each error of `AT_WORK`."""
    models, told = npu.run("-c", TRY, json.dumps([[*BEST], [*AT_WORK]])).report()
    return models, told


def test_without_flags_a_model_is_on_the_chip_in_its_best_dtype(tried: Tried) -> None:
    for (device, given, note), (soc, dtype) in zip(tried[0], BEST.items(), strict=True):
        assert (device, given) == (f"npu:0 ({soc})", dtype)
        assert note == f"computing on npu:0 ({soc}) in {dtype}: the first accelerator; the best type of this device"


def test_without_cann_a_model_is_on_the_cpu_and_that_is_told(npu: FakeNpu) -> None:
    ran = npu.run("-c", TRY, json.dumps([[""], []]), with_cann=False)
    ((device, dtype, note),), _ = ran.report()

    assert (device, dtype) == ("cpu", "float32")
    assert note.startswith("computing on cpu in float32: torch_npu ")
    assert "the libraries of CANN are not found" in note


def test_torch_does_not_import_beside_torch_npu_without_cann_unless_loading_is_deferred(npu: FakeNpu) -> None:
    loaded = npu.run("-c", "import torch", with_cann=False, TORCH_DEVICE_BACKEND_AUTOLOAD="1")

    assert loaded.code != 0
    assert "Failed to load the backend extension: torch_npu" in loaded.stderr


AT_WORK = {
    "507015": ("An operator failed on the NPU", "--operators aten"),
    "107002": ("The thread's context on the NPU is gone", "--encoder-process"),
    "207001": ("The memory of the NPU is not enough", "--batch-size"),
    "999999": ("The NPU failed", "npu-smi info"),
}


@pytest.mark.parametrize("code", AT_WORK)
def test_an_error_of_a_running_device_has_its_code(tried: Tried, code: str) -> None:
    ended, said = tried[1][code]
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
