"""The real wheel with missing parts: our errors appear in place of torch_npu's."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from llama_adapter.runtime.device_failures import CODES
from tests.npu.wheel import FakeNpu

pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]
# Opens each device in the arguments with its variables, and gives the names, or the errors' messages and hints: first
# in processes that load torch_npu, then in one that has loaded it. Then loads a model on each chip, makes the last
# chip's device fail with each error, and prints the results. Each case is a fork; the later ones are forks of a process
# that has loaded torch_npu, if there are chips.
PROGRAM = """
import contextlib, functools, io, json, os, sys
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from llama_adapter.runtime.devices import open_backend, open_best
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from tests.npu.inside import in_fork
from tests.npu.inside.host_ops import HostOps

def opened(name):
    try:
        return open_backend(name).name
    except DeviceError as error:
        return error.message, error.hint

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

def opened_all(attempts):
    return [in_fork(functools.partial(opened, name), **variables) for name, variables in attempts]

unloaded, attempts, chips, errors = json.loads(sys.argv[1])
devices = opened_all(unloaded)
if chips != [""]:
    load_torch_npu()
devices += opened_all(attempts)
models = [in_fork(loaded, FAKE_SOC=soc) for soc in chips]
told = in_fork(functools.partial(failed, errors), FAKE_SOC=chips[-1]) if errors else {}
print(json.dumps([devices, models, told]))
"""
BEST = {"Ascend310P3": "float16", "Ascend910B3": "bfloat16"}


class Tried(NamedTuple):
    """What `PROGRAM` has printed."""

    opened: list[Any]
    models: list[tuple[str, str, str]]  # device, dtype and note
    told: dict[str, tuple[int, str]]  # by error: exit code and message


def try_all(npu: FakeNpu, *attempts: Sequence[object], with_cann: bool) -> Tried:
    """`attempts` are the arguments of `PROGRAM`."""
    outcome = npu.run("-c", PROGRAM, json.dumps(attempts), with_cann=with_cann)
    assert outcome.code == 0, outcome.stderr[-3000:]
    return Tried(*json.loads(outcome.stdout))  # fails if anything else was printed


@pytest.fixture(scope="module")
def without_cann(npu: FakeNpu) -> Tried:
    return try_all(npu, [("npu:0", {}), ("auto", {})], [], [""], [], with_cann=False)


@pytest.fixture(scope="module")
def tried(npu: FakeNpu, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    soc, empty = {"FAKE_SOC": "Ascend310P3"}, str(tmp_path_factory.mktemp("home"))
    unloaded = (
        ("npu:0", {**soc, "ASCEND_HOME_PATH": "/nowhere/cann"}),
        ("npu:0", {**soc, "ASCEND_HOME_PATH": empty, "ASCEND_OPP_PATH": empty}),
        ("auto", soc),
    )
    return try_all(npu, unloaded, [("npu:0", {})], [*BEST], [*AT_WORK], with_cann=True)


def test_without_cann_a_model_is_on_the_cpu_and_that_is_told(without_cann: Tried) -> None:
    (message, hint), auto = without_cann.opened
    ((device, dtype, note),) = without_cann.models

    assert "the libraries of CANN are not found (ImportError: libhccl.so: cannot open shared object file" in message
    assert "set_env.sh" in hint
    assert (auto, device, dtype) == ("cpu", "cpu", "float32")
    assert note.startswith("computing on cpu in float32: torch_npu ")
    assert "the libraries of CANN are not found" in note


def test_a_missing_or_empty_home_of_cann_and_a_machine_without_a_device(tried: Tried) -> None:
    (missing, _), (empty, _), auto, (none, hint) = tried.opened

    assert "ASCEND_HOME_PATH : /nowhere/cann does not exist" in missing
    assert "runtime" in empty
    assert missing.partition("(")[0] == empty.partition("(")[0]
    assert "there is no NPU" in none
    assert "npu-smi info" in hint
    assert "--device cpu" in hint
    assert auto == "npu:0 (Ascend310P3)"


def test_without_flags_a_model_is_on_the_chip_in_its_best_dtype(tried: Tried) -> None:
    for (device, given, note), (soc, dtype) in zip(tried.models, BEST.items(), strict=True):
        assert (device, given) == (f"npu:0 ({soc})", dtype)
        assert note == f"computing on npu:0 ({soc}) in {dtype}: the first accelerator; the best type of this device"


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
    ended, said = tried.told[code]
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
