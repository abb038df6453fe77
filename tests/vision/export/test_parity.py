"""The comparison finds graphs that compute something else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.seal import SEAL_KEY
from llama_adapter.vision.export.parity import BOUNDS, compare, judge

pytestmark = pytest.mark.slow

REFERENCE = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)


def test_altered_weights_are_found(exported: Callable[..., Any], tmp_path: Path) -> None:
    made = exported("rgb", "float16", 18)
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
    rgb, bgr = exported("rgb", "float16", 18), exported("bgr", "float32", 17)

    assert not compare(bgr.path, rgb.encoder, rgb.pixels).ok
    assert not compare(rgb.path, bgr.encoder, rgb.pixels).ok


def test_equal_queries_are_equal() -> None:
    parity = judge(np.stack([REFERENCE, REFERENCE]), REFERENCE, bound=BOUNDS["float32"])

    assert parity.ok
    assert parity.max_abs == parity.mean_abs == 0.0
    assert parity.cosine_min == pytest.approx(1.0)


@pytest.mark.parametrize("fault", [1e-2, np.nan, np.inf])
@pytest.mark.parametrize("run", [0, 1])
def test_one_wrong_number_in_one_run_is_enough(fault: float, run: int) -> None:
    runs = np.stack([REFERENCE, REFERENCE])
    runs[run, 1, 2, 3] += fault

    with np.errstate(invalid="ignore"):
        assert not judge(runs, REFERENCE, bound=BOUNDS["float32"]).ok


def test_the_tolerance_grows_with_the_queries_and_never_shrinks() -> None:
    def tolerance(scale: float) -> float:
        return judge(REFERENCE[None] * scale, REFERENCE * np.float32(scale), bound=BOUNDS["float16"]).tolerance

    assert tolerance(0.01) == BOUNDS["float16"].max_abs
    assert tolerance(100.0) == pytest.approx(100 * tolerance(1.0), rel=0.1)


def test_queries_of_another_shape_are_another_model() -> None:
    with pytest.raises(GraphError, match=r"\(4, 7\).*\(4, 8\)"):
        judge(REFERENCE[None, ..., :7], REFERENCE, bound=BOUNDS["float32"])


def test_a_file_that_is_no_graph_is_told(exported: Callable[..., Any], tmp_path: Path) -> None:
    made = exported("rgb", "float16", 18)
    (tmp_path / "clip.onnx").write_bytes(b"nothing")

    with pytest.raises(GraphError, match="cannot open"):
        compare(tmp_path / "clip.onnx", made.encoder, made.pixels)


def test_without_pictures_there_is_nothing_to_compare(exported: Callable[..., Any]) -> None:
    made = exported("rgb", "float16", 18)

    with pytest.raises(ValueError, match="at least one picture"):
        compare(made.path, made.encoder, made.pixels[:0])
