"""The output of `export_onnx`: the encoder's arithmetic, for any batch, in operators that ATC supports.

The comparison with the encoder finds graphs that compute something else.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import METADATA_KEY, GraphCard, GraphDtype, Port, fingerprint
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.seal import SEAL_KEY, check_seal
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import Activation, ClipConfig, ConnectorConfig, PixelRule, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.export import BOUNDS, compare, export_onnx, judge
from tests.fakes.exported import open_onnx
from tests.fakes.towers import CONNECTORS, QUERY, SIGLIP, TOWERS
from tests.parity.exported import golden_bgr_onnx, golden_onnx
from tests.parity.golden import PICTURES, model, pixels

KINDS = TOWERS | CONNECTORS
KINDS["no blocks, patches of a tower without class token"] = VisionConfig(
    clip=dataclasses.replace(SIGLIP, drops_class=True), query=dataclasses.replace(QUERY, depth=0)
)
KINDS["norms with a large epsilon"] = VisionConfig(clip=dataclasses.replace(SIGLIP, norm_eps=1e-2), query=QUERY)
KINDS["exact GELU"] = VisionConfig(clip=dataclasses.replace(SIGLIP, activation="exact_gelu"), query=QUERY)
KINDS["CLIP's defaults"] = VisionConfig(
    clip=ClipConfig(image_size=56, patch_size=14, width=64, num_layers=1, num_heads=2, output_dim=48), query=QUERY
)
REFERENCE = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)


class Exported(NamedTuple):
    path: Path
    card: EncoderCard
    encoder: PictureEncoder
    pixels: Any  # uint8 (B, 224, 224, 3)


@pytest.fixture(scope="module")
def bgr() -> Exported:
    """The export in float16 and opset 17, shared with other test files."""
    encoder = model("BIAS-TINY", channel_order="bgr").encoder
    sums = fingerprint(encoder.state_dict())
    card = EncoderCard(name="tiny", vision=encoder.config, dtype="float16", opset=17, fingerprint=sums)
    return Exported(golden_bgr_onnx(), card, encoder, pixels(PICTURES[:4]).numpy())


def random_encoder(config: VisionConfig) -> PictureEncoder:
    torch.manual_seed(0)
    return PictureEncoder(config).eval().requires_grad_(False)


def some_pixels(config: VisionConfig) -> np.ndarray:
    """Pixels of three pictures, uint8 (3, S, S, 3)."""
    side = config.clip.image_size
    return pixels(PICTURES[:3])[:, :side, :side].numpy()


@pytest.mark.proves("towers: CLIP B to bigG, SigLIP, DINOv2", "ONNX")
@pytest.mark.parametrize(("dtype", "opset", "largest"), [("float32", 17, 1e-4), ("float16", 18, 2e-2)])
@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_tower_of_every_kind_is_exported_with_its_card(
    config: VisionConfig, dtype: GraphDtype, opset: int, largest: float, tmp_path: Path
) -> None:
    encoder, path = random_encoder(config), tmp_path / "encoder.onnx"
    card = export_onnx(config, encoder.state_dict(), path, name="tower", dtype=dtype, opset=opset)

    parity = compare(path, encoder, some_pixels(config))

    assert parity.ok
    assert parity.max_abs < largest
    graph, side = read_graph(path), config.clip.image_size
    assert lint_graph(graph) == []
    onnx.checker.check_model(path, full_check=True)
    assert graph.opset == opset
    assert graph.inputs == (Port(name="input", dtype=dtype, shape=(-1, side, side, 3)),)
    assert graph.outputs == (Port(name="output", dtype=dtype, shape=(-1, *card.output_shape)),)
    assert not {"Shape", "Gather", "Expand", "ConstantOfShape"} & graph.operators.keys()  # computes no shapes
    assert open_onnx(path).card == card
    assert open_onnx(path).pixels == config.clip.pixels


def test_the_kinds_have_both_sides_of_every_switch() -> None:
    """The graph is written beside the encoder: a switch that no kind has could be missing in it."""
    of_pixels = {field.name for field in dataclasses.fields(PixelRule)}
    seen = [part for config in KINDS.values() for part in (config, config.clip, config.query)]
    for kind in (VisionConfig, ClipConfig, ConnectorConfig):
        parts = [part for part in seen if isinstance(part, kind)]
        for field in dataclasses.fields(kind):
            if field.default is not dataclasses.MISSING and field.name not in of_pixels:
                values = {getattr(part, field.name) for part in parts}
                assert {field.default} < values, (kind, field.name)
    assert {part.activation for part in seen if isinstance(part, ClipConfig)} == set(get_args(Activation))


def test_the_card_in_the_file_describes_the_original_model(bgr: Exported) -> None:
    entries = {entry.key: entry.value for entry in onnx.load(bgr.path).metadata_props}

    assert entries.keys() == {METADATA_KEY, SEAL_KEY}
    card = bgr.card.to_graph()
    # Its fingerprint is computed before flip and rounding.
    assert GraphCard.from_json(entries[METADATA_KEY], file="clip.onnx") == card == read_graph(bgr.path).card
    assert bgr.card.vision.channel_order == "bgr"
    assert bgr.card.fingerprint.keys() == {"clip", "query"}
    assert json.loads(entries[METADATA_KEY])["opset"] == 17


def test_the_file_contains_no_path_of_this_machine(bgr: Exported) -> None:
    model = onnx.load(bgr.path)
    del model.graph.initializer[:]

    assert "/" not in str(model).replace("//", "")
    assert ".py" not in str(model)


def test_weights_that_float16_cannot_hold_are_refused(bgr: Exported, tmp_path: Path) -> None:
    state = bgr.encoder.state_dict() | {"query.queries": torch.full_like(bgr.encoder.query.queries, 1e6)}

    with pytest.raises(GraphError, match=r"`query\.queries`") as caught:
        export_onnx(bgr.encoder.config, state, tmp_path / "clip.onnx", name="tiny", dtype="float16")

    assert caught.value.hint == "export in float32: `--dtype float32`, or `--precision float32` of `export decoder`"
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_an_error_with_the_command_to_install_them(
    bgr: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(GraphError, match="onnx, onnx-ir, which are missing") as caught:
        export_onnx(bgr.encoder.config, bgr.encoder.state_dict(), tmp_path / "clip.onnx", name="tiny")

    assert caught.value.hint == "in the folder of this project: pip install --editable '.[onnx]'"


@pytest.mark.parametrize("settings", [{"opset": 19}, {"opset": 16}, {"dtype": "bfloat16"}])
def test_other_opsets_and_types_are_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be"):
        export_onnx(None, {}, tmp_path / "clip.onnx", name="tiny", **settings)  # type: ignore[arg-type]


def test_large_weights_go_into_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.vision.export._MAX_PROTOBUF_BYTES", 100_000)
    config, path = CONNECTORS["LLaVA"], tmp_path / "clip.onnx"
    encoder = random_encoder(config)

    export_onnx(config, encoder.state_dict(), path, name="large", dtype="float32")

    assert sorted(file.name for file in tmp_path.iterdir()) == ["clip.onnx", "clip.onnx.data"]
    assert read_graph(path).num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) > 200_000
    assert path.stat().st_size < 50_000
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    check_seal(path, session.get_modelmeta().custom_metadata_map[SEAL_KEY])
    assert compare(path, encoder, some_pixels(config)).ok


def test_changed_weights_are_found(bgr: Exported, tmp_path: Path) -> None:
    model = onnx.load(bgr.path)
    norm = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("pre_norm.weight"))
    norm.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(norm) * np.float16(1.5), norm.name))
    onnx.save(model, tmp_path / "altered.onnx")
    with pytest.raises(GraphError, match="changed after its export"):
        compare(tmp_path / "altered.onnx", bgr.encoder, bgr.pixels)

    # Without the digest in the file, the comparison itself finds the change.
    (seal,) = [entry for entry in model.metadata_props if entry.key == SEAL_KEY]
    model.metadata_props.remove(seal)
    onnx.save(model, tmp_path / "altered.onnx")
    parity = compare(tmp_path / "altered.onnx", bgr.encoder, bgr.pixels)

    assert not parity.ok
    assert parity.max_abs > parity.tolerance


def test_the_other_order_of_colours_is_found(bgr: Exported) -> None:
    assert not compare(bgr.path, model("BIAS-TINY").encoder, bgr.pixels).ok
    assert not compare(golden_onnx(), bgr.encoder, bgr.pixels).ok


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
