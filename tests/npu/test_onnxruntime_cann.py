"""ONNX graphs in the real onnxruntime-cann: registration, options, and errors with and without CANN's libraries."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.graphs.onnx_provider import KINDS
from tests.fakes.foreign_onnx import foreign_onnx
from tests.npu import wheel

CANN = KINDS["npu"]
LATER = {"precision_mode_v2", "input_format", "dynamic_batch_size", "dynamic_image_size", "dynamic_dims"}
# Opens the graph on a device once per case, with the case's options, and prints the results.
PROGRAM = """
import json, sys
import onnxruntime
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.graphs.onnx_provider import provider_of_device
from llama_adapter.runtime.graphs.onnx_session import open_inference_session

def opened(device, *options):
    try:
        provider = provider_of_device(device, options=options)
        session = open_inference_session(sys.argv[1], threads=1, provider=provider)
    except LlamaAdapterError as error:
        return {"error": error.message, "hint": error.hint}
    return {"providers": session.get_providers(), "options": session.get_provider_options()}

cases = json.loads(sys.argv[2])
print(json.dumps([onnxruntime.get_available_providers(), *(opened(*case) for case in cases)]))
"""


@pytest.fixture(scope="module")
def cann() -> wheel.FakeNpu:
    try:
        return wheel.onnxruntime_cann()
    except wheel.UnavailableError as error:
        pytest.skip(str(error))


def reports(cann: wheel.FakeNpu, folder: Path, *cases: tuple[str, ...], **how: Any) -> list[Any]:
    file = foreign_onnx(folder / "a.onnx", ("n", 2, 2, 3))
    answer: list[Any] = cann.run("-c", PROGRAM, str(file), json.dumps(cases), **how).report()
    return answer


def test_without_the_libraries_of_cann_the_provider_is_registered_and_does_not_start(
    cann: wheel.FakeNpu, tmp_path: Path
) -> None:
    registered, on_npu, on_cpu, on_cuda = reports(cann, tmp_path, ("npu:0",), ("cpu",), ("cuda:0",), with_cann=False)

    assert registered == [CANN.name, "CPUExecutionProvider"]
    assert on_npu["error"] == (
        f"{CANN.name} of onnxruntime {wheel.ORT_VERSION} does not start on device 0: create CANN ExecutionProvider fail"
    )
    assert "set_env.sh" in on_npu["hint"]
    assert on_cpu["providers"] == ["CPUExecutionProvider"]
    assert "onnxruntime-gpu" in on_cuda["hint"]


@pytest.mark.proves("execution providers", "ONNX")
def test_the_options_are_those_that_the_wheel_takes(cann: wheel.FakeNpu, tmp_path: Path) -> None:
    taken = {"npu_mem_limit": "1000000000", "arena_extend_strategy": "kSameAsRequested", "enable_cann_graph": "0"}
    cases = [("npu:0", *(f"{name}={value}" for name, value in taken.items())), ("npu:1",)]
    cases += [("npu:0", f"{name}=1") for name in sorted(LATER)] + [("npu:0", "dump_graphs=much")]

    _, opened, no_device, *unknown, unreadable = reports(cann, tmp_path, *cases, soc=wheel.SOC)

    assert opened["providers"] == [CANN.name, "CPUExecutionProvider"]
    options = opened["options"][CANN.name]
    assert options.items() >= {**taken, "device_id": "0"}.items()
    assert {*options} == CANN.options - LATER
    assert "Invalid device ID: 1" in no_device["error"]
    for name, refused in zip(sorted(LATER), unknown, strict=True):
        assert f'Unknown provider option: "{name}"' in refused["error"]
    assert 'Failed to parse provider option "dump_graphs"' in unreadable["error"]
