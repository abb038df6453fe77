"""onnxruntime's execution providers: chosen by device, with checked options, and never replaced silently."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.onnx_provider import CPU, KINDS, OnnxProvider, provider_of_device
from llama_adapter.runtime.graphs.onnx_session import open_inference_session
from tests.fakes.foreign_onnx import foreign_onnx

CUDA, CANN = KINDS["cuda"].name, KINDS["npu"].name
INI = f"""
[{CANN}]
npu_mem_limit = 8589934592  ; bytes
precision_mode = must_keep_origin_dtype
[{CUDA}]
use_tf32 = 0
[session]
session.disable_cpu_ep_fallback = 1
[ascend_context]  # another program's
provider = ge
"""


def test_a_device_chooses_its_provider() -> None:
    assert provider_of_device("cpu") == CPU
    assert provider_of_device("cuda:1") == OnnxProvider(name=CUDA, options={"device_id": "1"})
    assert provider_of_device("npu") == OnnxProvider(name=CANN, options={"device_id": "0"})
    for device in ("1", "gpu:0", "npu:256", "cpu:0", ""):
        with pytest.raises(ValueError, match="wanted cpu"):
            provider_of_device(device)


def test_options_come_from_a_file_and_from_flags_which_win(tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    config.write_text(INI)
    given = ["precision_mode=force_fp16", "session.set_denormal_as_zero=1"]

    provider = provider_of_device("npu:2", options=given, config=str(config))

    assert provider.options == {"npu_mem_limit": "8589934592", "precision_mode": "force_fp16", "device_id": "2"}
    assert provider.session_entries == {"session.disable_cpu_ep_fallback": "1", "session.set_denormal_as_zero": "1"}
    assert provider_of_device("cuda:0", config=str(config)).options == {"use_tf32": "0", "device_id": "0"}


@pytest.mark.parametrize(
    ("device", "option", "hint"),
    [
        ("npu:0", "optypelist_for_impl_mode=Gelu", "`optypelist_for_implmode` may be meant"),
        ("npu:0", "gpu=1", "known: arena_extend_strategy, device_id, "),
        ("cuda:0", "gpu_memory_limit=1", "`gpu_mem_limit` may be meant"),
        ("cpu", "device_id=0", "known: none"),
        ("cpu", "session.disable_cpu_ep_fallbak=1", "`session.disable_cpu_ep_fallback` may be meant"),
        ("npu:0", "device_id=1", "leave device_id out"),
    ],
)
def test_an_unknown_option_is_refused(device: str, option: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        provider_of_device(device, options=[option])
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[CANExecutionProvider]\ndump_graphs = 1", r"\[CANExecutionProvider\]"),
        ("[ascend_context]\nprovider = ge", r"its sections: \[ascend_context\]"),
        ("", "its sections: none"),
        ("dump_graphs = 1", "no section headers"),
        ("[session]\nsession.x = 1\nsession.x = 2", "already exists"),
        (None, "No such file"),
    ],
)
def test_a_file_that_configures_nothing_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    config = tmp_path / "config.ini"
    if text is not None:
        config.write_text(text)
    with pytest.raises(UsageError, match=words):
        provider_of_device("npu:0", config=str(config))


def test_a_provider_that_is_not_installed_is_an_error_with_its_wheel(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    for device, packages in (("cuda:0", "onnxruntime-gpu"), ("npu:0", "onnxruntime-cann 'numpy<2'")):
        with pytest.raises(GraphError, match=r"it has .*CPUExecutionProvider") as caught:
            open_inference_session(file, threads=1, provider=provider_of_device(device))
        assert f"pip install {packages} " in caught.value.hint


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_session_that_fell_back_to_the_cpu_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like onnxruntime-gpu without CUDA's libraries, which opens the graph on the CPU and returns a session."""
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU.name])
    with pytest.raises(GraphError, match=f"{CUDA} .*device 1: it opened the graph with CPUExecutionProvider"):
        open_inference_session(file, threads=1, provider=provider_of_device("cuda:1"))


def test_session_entries_reach_the_session(tmp_path: Path) -> None:
    file = foreign_onnx(tmp_path / "a.onnx", ("n", 2, 2, 3))
    provider = provider_of_device("cpu", options=["session.set_denormal_as_zero=1"])

    session: Any = open_inference_session(file, threads=1, provider=provider)

    options = session.get_session_options()
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
