"""The real wheel where something is missing: our errors in place of torch_npu's."""

import json
import re
from pathlib import Path

import pytest

from llama_adapter.runtime.device_failures import CODES
from tests.npu.wheel import FakeNpu

pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]
OPEN = """
import json, sys
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.devices import open_backend
try:
    open_backend(sys.argv[1])
except DeviceError as error:
    print(json.dumps([error.message, error.hint]))
"""


def open_device(npu: FakeNpu, name: str = "npu:0", **options) -> tuple[str, str]:
    outcome = npu.run("-c", OPEN, name, **options)
    assert outcome.code == 0, outcome.stderr
    message, hint = json.loads(outcome.stdout)  # and nothing else was printed there
    return message, hint


def test_cann_that_is_missing_or_was_not_sourced(npu: FakeNpu) -> None:
    message, hint = open_device(npu, with_cann=False)

    assert "the libraries of CANN are not found (ImportError: libhccl.so: cannot open shared object file" in message
    assert "set_env.sh" in hint


def test_a_missing_or_empty_home_of_cann(npu: FakeNpu, tmp_path: Path) -> None:
    missing, _ = open_device(npu, soc="Ascend310P3", ASCEND_HOME_PATH="/nowhere/cann")
    empty, _ = open_device(npu, soc="Ascend310P3", ASCEND_HOME_PATH=str(tmp_path), ASCEND_OPP_PATH=str(tmp_path))

    assert "ASCEND_HOME_PATH : /nowhere/cann does not exist" in missing
    assert "runtime" in empty
    assert missing.partition("(")[0] == empty.partition("(")[0]


def test_a_machine_without_a_device(npu: FakeNpu) -> None:
    message, hint = open_device(npu)

    assert "no NPU is" in message
    assert "npu-smi info" in hint
    assert "--device cpu" in hint


def test_auto_is_the_cpu_if_torch_npu_does_not_load(npu: FakeNpu) -> None:
    source = "from llama_adapter.runtime.devices import open_backend; print(open_backend('auto').name)"

    assert npu.run("-c", source, with_cann=False).stdout == "cpu\n"
    assert npu.run("-c", source, soc="Ascend310P3").stdout == "npu:0 (Ascend310P3)\n"


def test_torch_imports_beside_torch_npu_without_cann_only_if_loading_is_deferred(npu: FakeNpu) -> None:
    loaded = npu.run("-c", "import torch", with_cann=False, TORCH_DEVICE_BACKEND_AUTOLOAD="1")

    assert loaded.code != 0
    assert "Failed to load the backend extension: torch_npu" in loaded.stderr
    assert npu.run("-c", "import torch", with_cann=False).code == 0


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
    defined = {int(code) for code in re.findall(r"_RT_\w+\s+(\d{6})\b", header.read_text(encoding="utf-8"))}
    defined |= {int(code) for code in re.findall(r"ACL_ERROR_STREAM_\w+\s+(\d{6})\b", header.read_text())}

    assert {code for code in CODES if code // 1000 in (107, 207, 507)} <= defined
