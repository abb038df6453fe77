"""What `export_onnx` writes: the encoder's own arithmetic, for any batch, in operators that ATC has."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs import packages
from llama_adapter.runtime.graphs.card import METADATA_KEY, EncoderCard
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.ports import Port
from llama_adapter.runtime.graphs.seal import SEAL_KEY
from llama_adapter.vision.export.onnx import export_onnx
from llama_adapter.vision.export.parity import compare

pytestmark = pytest.mark.slow

# Each two values of different columns meet somewhere.
CASES = [
    ("bgr", "float32", 17),
    ("rgb", "float16", 18),
    ("rgb", "float32", 17),
    ("bgr", "float32", 18),
    ("bgr", "float16", 17),
]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "dtype", "opset"), CASES)
def test_the_graph_computes_what_the_encoder_does(
    exported: Callable[..., Any], order: str, dtype: str, opset: int
) -> None:
    made = exported(order, dtype, opset)

    parity = compare(made.path, made.encoder, made.pixels)

    assert parity.ok
    assert parity.num_pictures == 4
    assert parity.max_abs < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize(("order", "dtype", "opset"), CASES)
def test_the_graph_has_nothing_to_complain_about(
    exported: Callable[..., Any], order: str, dtype: str, opset: int
) -> None:
    made = exported(order, dtype, opset)
    graph = read_graph(made.path)

    assert lint_graph(graph) == []
    onnx.checker.check_model(made.path, full_check=True)
    assert graph.opset == opset
    assert graph.inputs == (Port(name="input", dtype=dtype, shape=(-1, 224, 224, 3)),)
    assert graph.outputs == (Port(name="output", dtype=dtype, shape=(-1, *made.card.output_shape)),)
    assert not {"Shape", "Gather", "Expand", "ConstantOfShape"} & graph.operators.keys()  # no arithmetic of shapes


@pytest.mark.parametrize("batch", [1, 3])
def test_the_batch_is_free(exported: Callable[..., Any], batch: int) -> None:
    made = exported("rgb", "float16", 18)
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])

    (query,) = session.run(None, {"input": made.pixels[:batch].astype(np.float16)})

    assert query.shape == (batch, *made.card.output_shape)
    assert query.dtype == np.float16


def test_the_order_of_colours_is_in_the_weights(exported: Callable[..., Any]) -> None:
    made = exported("bgr", "float32", 17)
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    swapped = np.ascontiguousarray(made.pixels[:2, ..., ::-1])

    (query,) = session.run(None, {"input": swapped.astype(np.float32)})

    with torch.inference_mode():
        of_rgb = made.encoder(torch.from_numpy(made.pixels[:2])).numpy()
        of_swapped = made.encoder(torch.from_numpy(swapped)).numpy()
    assert np.abs(of_rgb - of_swapped).max() > 1e-2  # the order does matter here
    assert np.abs(query - of_swapped).max() < 1e-5


def test_the_card_is_in_the_file_and_tells_of_the_model_as_it_was(exported: Callable[..., Any]) -> None:
    made = exported("bgr", "float32", 17)
    entries = {entry.key: entry.value for entry in onnx.load(made.path).metadata_props}

    assert entries.keys() == {METADATA_KEY, SEAL_KEY}
    assert EncoderCard.from_json(entries[METADATA_KEY], file="clip.onnx") == made.card == read_graph(made.path).card
    assert made.card.vision.channel_order == "bgr"
    assert made.card.fingerprint.keys() == {"clip", "query"}
    assert json.loads(entries[METADATA_KEY])["opset"] == 17


def test_a_float16_export_has_the_fingerprint_of_its_float32_checkpoint(exported: Callable[..., Any]) -> None:
    assert (
        exported("rgb", "float16", 18).card.fingerprint == exported("bgr", "float32", 17).card.fingerprint
    )  # of the weights as they were, before the flip


def test_nothing_in_the_file_names_a_place_of_this_machine(exported: Callable[..., Any]) -> None:
    model = onnx.load(exported("rgb", "float16", 18).path)
    del model.graph.initializer[:]

    assert "/" not in str(model).replace("//", "").replace("encoder/", "")
    assert ".py" not in str(model)


@pytest.mark.slow
def test_exporting_says_nothing(
    exported: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = exported("rgb", "float16", 18)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_onnx(made.encoder.config, made.encoder.state_dict(), tmp_path / "clip.onnx", name="tiny")

    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["clip.onnx"]


def test_weights_that_float16_cannot_hold_are_refused(exported: Callable[..., Any], tmp_path: Path) -> None:
    made = exported("rgb", "float16", 18)
    state = made.encoder.state_dict() | {"query.queries": torch.full_like(made.encoder.query.queries, 1e6)}

    with pytest.raises(GraphError, match=r"`query\.queries` are too large for float16") as caught:
        export_onnx(made.encoder.config, state, tmp_path / "clip.onnx", name="tiny", dtype="float16")

    assert "float32" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_told_with_the_way_to_get_them(
    exported: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported("rgb", "float16", 18)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)

    with pytest.raises(GraphError, match="onnx, onnxscript, which are missing") as caught:
        export_onnx(made.encoder.config, made.encoder.state_dict(), tmp_path / "clip.onnx", name="tiny")

    assert caught.value.hint == "in the folder of this project: pip install --editable '.[onnx]'"


@pytest.mark.parametrize("settings", [{"opset": 19}, {"opset": 16}, {"dtype": "bfloat16"}])
def test_what_atc_or_the_runtimes_do_not_take_is_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        export_onnx(None, {}, tmp_path / "clip.onnx", name="tiny", **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_weights_that_one_file_cannot_hold_go_beside_it(
    exported: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported("rgb", "float16", 18)
    monkeypatch.setattr("llama_adapter.vision.export.onnx._MAX_PROTOBUF_BYTES", 1_000_000)
    path = tmp_path / "clip.onnx"

    export_onnx(made.encoder.config, made.encoder.state_dict(), path, name="tiny", dtype="float16")

    assert sorted(file.name for file in tmp_path.iterdir()) == ["clip.onnx", "clip.onnx.data"]
    assert read_graph(path).num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) > 1_000_000
    assert path.stat().st_size < 200_000
    assert compare(path, made.encoder, made.pixels[:2]).ok
