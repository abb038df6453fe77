"""Errors of MindIR decoders if MindSpore is not installed; tests/mindspore runs these decoders."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_adapter import Captioner, InferTask, pipeline
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.exported.card import CARD_FILE, ExportCard
from llama_adapter.runtime.errors import GraphError, UsageError
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime, mindir_runtime
from tests.llm.toys import CONFIG


@pytest.fixture(autouse=True)
def without_mindspore(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if "mindspore" in name else found(name, *rest)
    )


def test_an_export_says_what_to_install_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(GraphError) as failure:
        run_export_decoder(DecoderJob(out=str(tmp_path / "made"), format="mindir"))
    assert "[mindspore]" in (failure.value.hint or "")
    assert list(tmp_path.iterdir()) == []
    for precision in ("int8", "int4"):  # only floats are exported
        with pytest.raises(ValueError, match="precision"):
            DecoderJob(out="made", format="mindir", precision=precision)  # type: ignore[arg-type]


def test_devices_of_mindir_graphs() -> None:
    made = mindir_runtime("npu:3", backend="mslite", config_path=None)
    assert made == MindirRuntime(backend="mslite", is_ascend=True, device_id=3)
    assert made.device == "npu:3"
    assert mindir_runtime("cpu", backend="ms", config_path=None).device == "cpu"
    for device in ("cuda", "cuda:1", "npu:x"):
        with pytest.raises(UsageError):
            mindir_runtime(device, backend="ms", config_path=None)
    paths = {"prefill_model_path": "a.mindir", "increment_model_path": "b.mindir"}
    with pytest.raises(UsageError, match="rank_id"):  # settings beside the paths of graphs are kept
        pipeline("caption", {"rank_id": 1}, backend="mslite", **paths)


def test_missing_graphs_and_those_of_other_programs_are_told(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    pair = [foreign / f"bloom_{kind}_graph.mindir" for kind in ("prefill", "inc")]
    for model in (None, pair, foreign, "nowhere"):
        with pytest.raises(UsageError):
            pipeline("caption", model, backend="mslite")
    for path in pair:
        path.write_bytes(b"graph")
    for model in (pair, foreign):
        with pytest.raises(UsageError) as failure:
            pipeline("caption", model, backend="mslite")
        assert CARD_FILE in failure.value.message
    with pytest.raises(GraphError):
        Captioner.load(decoder=foreign, decoder_backend="ms")


def test_models_without_graphs_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("command: caption\n")
    (tmp_path / "a.bin").write_bytes(b"weights")
    for model in (tmp_path / "a.yaml", tmp_path / "a.bin", 17):
        with pytest.raises(UsageError, match=f"`{model}` names no MindIR graphs"):
            pipeline("caption", model, backend="mslite")
    own: dict[str, Any] = dict.fromkeys(("name", "digest", "prompt", "channel_order"), "x")
    own |= {"format": "onnx", "dtype": "float32", "precision": "float", "has_sampling": True}
    ExportCard(**own, decoder=CONFIG.to_dict(), fingerprint={}, files={}).write(tmp_path)
    (tmp_path / "a.yaml").unlink()
    with pytest.raises(UsageError, match="exported as onnx"):
        pipeline("caption", tmp_path, backend="mslite")


def test_a_backend_that_is_given_runs_a_checkpoint_beside_graphs_of_other_programs(tmp_path: Path) -> None:
    folder = shutil.copytree(embedded_model(), tmp_path / "made")
    (folder / "bloom_prefill_graph.mindir").write_bytes(b"graph")
    with InferTask.get_infer_task("caption", folder, backend="torch", device="cpu") as made:  # type: ignore[arg-type]
        assert made.captioner.info.device == "cpu"
