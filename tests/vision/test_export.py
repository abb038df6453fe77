"""What `export_onnx` writes: the encoder's own arithmetic, for any batch, in operators that ATC has.

The comparison with the encoder finds graphs that compute something else.
"""

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
from onnx import numpy_helper

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs import packages
from llama_adapter.runtime.graphs.card import METADATA_KEYS, GraphCard, Port
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.seal import SEAL_KEY
from llama_adapter.vision.export import BOUNDS, compare, export_onnx, judge

pytestmark = pytest.mark.slow

REFERENCE = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
# Each value occurs once.
CASES = [("rgb", "float16", 17), ("bgr", "float32", 18)]


@pytest.mark.parametrize(("order", "dtype", "opset"), CASES)
def test_the_graph_computes_what_the_encoder_does(
    exported: Callable[..., Any], order: str, dtype: str, opset: int
) -> None:
    made = exported(order, dtype, opset)

    parity = compare(made.path, made.encoder, made.pixels)

    assert parity.ok
    assert parity.num_pictures == 4
    assert parity.max_abs < (1e-5 if dtype == "float32" else 1e-2)
    graph = read_graph(made.path)
    assert lint_graph(graph) == []
    onnx.checker.check_model(made.path, full_check=True)
    assert graph.opset == opset
    assert graph.inputs == (Port(name="input", dtype=dtype, shape=(-1, 224, 224, 3)),)
    assert graph.outputs == (Port(name="output", dtype=dtype, shape=(-1, *made.card.output_shape)),)
    assert not {"Shape", "Gather", "Expand", "ConstantOfShape"} & graph.operators.keys()  # no arithmetic of shapes


def test_the_order_of_colours_is_in_the_weights(exported: Callable[..., Any]) -> None:
    made = exported("bgr", "float32", 18)
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    swapped = np.ascontiguousarray(made.pixels[:2, ..., ::-1])

    (query,) = session.run(None, {"input": swapped.astype(np.float32)})

    with torch.inference_mode():
        of_rgb = made.encoder(torch.from_numpy(made.pixels[:2])).numpy()
        of_swapped = made.encoder(torch.from_numpy(swapped)).numpy()
    assert np.abs(of_rgb - of_swapped).max() > 1e-2  # the order does matter here
    assert np.abs(query - of_swapped).max() < 1e-5


def test_the_card_in_the_file_describes_the_original_model(exported: Callable[..., Any]) -> None:
    made = exported("bgr", "float32", 18)
    entries = {entry.key: entry.value for entry in onnx.load(made.path).metadata_props}

    assert entries.keys() == {METADATA_KEYS["vision"], SEAL_KEY}
    card = made.card.to_graph()
    assert GraphCard.from_json(entries[METADATA_KEYS["vision"]], file="clip.onnx") == card == read_graph(made.path).card
    assert made.card.vision.channel_order == "bgr"
    assert made.card.fingerprint.keys() == {"clip", "query"}
    assert json.loads(entries[METADATA_KEYS["vision"]])["opset"] == 18
    assert made.card.fingerprint == exported("rgb", "float16", 17).card.fingerprint  # before flip and rounding


def test_the_file_contains_no_path_of_this_machine(exported: Callable[..., Any]) -> None:
    model = onnx.load(exported("rgb", "float16", 17).path)
    del model.graph.initializer[:]

    assert "/" not in str(model).replace("//", "").replace("encoder/", "")
    assert ".py" not in str(model)


def test_weights_that_float16_cannot_hold_are_refused(exported: Callable[..., Any], tmp_path: Path) -> None:
    made = exported("rgb", "float16", 17)
    state = made.encoder.state_dict() | {"query.queries": torch.full_like(made.encoder.query.queries, 1e6)}

    with pytest.raises(GraphError, match=r"`query\.queries`"):
        export_onnx(made.encoder.config, state, tmp_path / "clip.onnx", name="tiny", dtype="float16")

    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_an_error_with_the_command_to_install_them(
    exported: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = exported("rgb", "float16", 17)
    monkeypatch.setattr(packages, "find_spec", lambda name: None)

    with pytest.raises(GraphError, match="onnx, onnxscript, which are missing") as caught:
        export_onnx(made.encoder.config, made.encoder.state_dict(), tmp_path / "clip.onnx", name="tiny")

    assert caught.value.hint == "in the folder of this project: pip install --editable '.[onnx]'"


@pytest.mark.parametrize("settings", [{"opset": 19}, {"opset": 16}, {"dtype": "bfloat16"}])
def test_other_opsets_and_types_are_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        export_onnx(None, {}, tmp_path / "clip.onnx", name="tiny", **settings)  # type: ignore[arg-type]


def test_large_weights_go_into_a_second_file_and_nothing_is_printed(
    exported: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = exported("rgb", "float16", 17)
    monkeypatch.setattr("llama_adapter.runtime.graphs.onnx_export._MAX_PROTOBUF_BYTES", 1_000_000)
    path = tmp_path / "clip.onnx"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_onnx(made.encoder.config, made.encoder.state_dict(), path, name="tiny", dtype="float16")

    assert capfd.readouterr() == ("", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["clip.onnx", "clip.onnx.data"]
    assert read_graph(path).num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) > 1_000_000
    assert path.stat().st_size < 200_000
    assert compare(path, made.encoder, made.pixels[:2]).ok


def test_changed_weights_are_found(exported: Callable[..., Any], tmp_path: Path) -> None:
    made = exported("rgb", "float16", 17)
    model = onnx.load(made.path)
    norm = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("pre_norm.weight"))
    norm.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(norm) * np.float16(1.5), norm.name))
    onnx.save(model, tmp_path / "altered.onnx")
    with pytest.raises(GraphError, match="changed after its export"):
        compare(tmp_path / "altered.onnx", made.encoder, made.pixels)

    # Without the digest that the file carries, the comparison itself finds it.
    (seal,) = [entry for entry in model.metadata_props if entry.key == SEAL_KEY]
    model.metadata_props.remove(seal)
    onnx.save(model, tmp_path / "altered.onnx")
    parity = compare(tmp_path / "altered.onnx", made.encoder, made.pixels)

    assert not parity.ok
    assert parity.max_abs > parity.tolerance


def test_the_other_order_of_colours_is_found(exported: Callable[..., Any]) -> None:
    rgb, bgr = exported("rgb", "float16", 17), exported("bgr", "float32", 18)

    assert not compare(bgr.path, rgb.encoder, rgb.pixels).ok
    assert not compare(rgb.path, bgr.encoder, rgb.pixels).ok


def test_equal_queries_are_equal_and_other_shapes_are_another_model() -> None:
    parity = judge(np.stack([REFERENCE, REFERENCE]), REFERENCE, bound=BOUNDS["float32"])
    with pytest.raises(GraphError, match=r"\(4, 7\).*\(4, 8\)"):
        judge(REFERENCE[None, ..., :7], REFERENCE, bound=BOUNDS["float32"])

    assert parity.ok
    assert parity.max_abs == parity.mean_abs == 0.0
    assert parity.cosine_min == pytest.approx(1.0)


@pytest.mark.parametrize("fault", [1e-2, np.nan, np.inf])
@pytest.mark.parametrize("run", [0, 1])
def test_one_wrong_number_in_one_run_fails(fault: float, run: int) -> None:
    runs = np.stack([REFERENCE, REFERENCE])
    runs[run, 1, 2, 3] += fault

    with np.errstate(invalid="ignore"):
        assert not judge(runs, REFERENCE, bound=BOUNDS["float32"]).ok


def test_the_tolerance_grows_with_the_queries_and_never_shrinks() -> None:
    def tolerance(scale: float) -> float:
        return judge(REFERENCE[None] * scale, REFERENCE * np.float32(scale), bound=BOUNDS["float16"]).tolerance

    assert tolerance(0.01) == BOUNDS["float16"].max_abs
    assert tolerance(100.0) == pytest.approx(100 * tolerance(1.0), rel=0.1)
