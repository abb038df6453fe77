"""The picture half compared with the reference, stage by stage."""

import pytest
import torch
from torch import Tensor

from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from tests.bounds import Float64, difference, largest, spread, unit
from tests.parity.golden import ADAPTERS, GOLDEN, PICTURES, exact_model, model, pixels, query_limit, tensors


def test_normalised_pixels_equal_the_reference() -> None:
    for name, corner in tensors("preprocess").items():
        normalised = model("BIAS-TINY").encoder.normalise(pixels([name.removeprefix("corner/")]))
        assert difference(normalised[0, :, :8, :8], corner) <= 4 * unit(torch.float32) * largest(corner)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.proves("visual query of the reference", "CPU")
def test_the_visual_query_equals_the_reference(adapter: str) -> None:
    ours = model(adapter).encoder(pixels(PICTURES))
    assert difference(ours, tensors(f"vision_{adapter}")["visual_query"]) <= query_limit(adapter)


def test_clip_features_of_all_tokens_equal_the_reference() -> None:
    golden = tensors("vision_BIAS-TINY")
    for picture in ("gradient_640x360.png", "shapes_200x300.jpg"):
        features = model("BIAS-TINY").encoder.features(pixels([picture]))[0]
        with Float64():
            exact = exact_model("BIAS-TINY").encoder.features(pixels([picture]))[0]
        assert difference(features, golden[f"clip_features/{picture}"]) <= spread(features, exact)


def stages_of(encoder: PictureEncoder) -> dict[str, Tensor]:
    """What each stage makes of one picture: (tokens, width)."""
    seen: dict[str, Tensor] = {}
    stages = {
        "clip_ln_pre": encoder.clip.pre_norm,
        "clip_block_0": encoder.clip.blocks[0],
        "clip_block_1": encoder.clip.blocks[1],
        "clip_proj_norm": encoder.query.input_norm,
        "visual_block_0": encoder.query.blocks[0],
        "visual_block_1": encoder.query.blocks[1],
        "visual_proj": encoder.query.output_projection,
    }
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: seen.update({name: output[0]}))
        for name, module in stages.items()
    ]
    encoder(pixels(["shapes_200x300.jpg"]))
    for hook in hooks:
        hook.remove()
    seen["queries"] = seen["visual_block_1"]  # the last block is asked for the queries alone
    [seen["visual_block_1"]] = encoder.query.blocks[1](seen["visual_block_0"][None])
    return seen


def test_every_stage_inside_the_encoder_equals_the_reference() -> None:
    encoder, golden = model("BIAS-TINY").encoder, tensors("vision_BIAS-TINY")
    ours = stages_of(encoder)
    with Float64():
        exact = stages_of(exact_model("BIAS-TINY").encoder)
    golden["trace/queries"] = golden["trace/visual_block_1"][: encoder.query.num_queries]
    for name, stage in ours.items():
        expected = golden[f"trace/{name}"]
        assert difference(stage[: len(expected)], expected) <= spread(stage, exact[name]), name


@pytest.mark.parametrize("picture", PICTURES)
def test_bgr_order_equals_the_reference_fed_as_by_opencv(picture: str) -> None:
    """As in the released adapters' training: upright, converted to RGB before resizing, then with reversed channels."""
    encoder = model("BIAS-TINY", channel_order="bgr").encoder
    image = load_picture(GOLDEN / "images" / picture, orientation="upright", transparency="ignore").image
    ours = encoder(torch.from_numpy(preprocess(image, convert="first"))[None])[0]
    golden = tensors("vision_BIAS-TINY")["visual_query_opencv_style"][PICTURES.index(picture)]
    assert difference(ours, golden) <= query_limit("BIAS-TINY", channel_order="bgr")


def test_pixels_may_come_as_bytes_or_as_floats() -> None:
    encoder, batch = model("BIAS-TINY").encoder, pixels(PICTURES[:2])
    assert torch.equal(encoder(batch), encoder(batch.to(torch.float16)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_near_the_reference(dtype: torch.dtype) -> None:
    ours = model("BIAS-TINY", dtype=dtype).encoder(pixels(PICTURES))
    assert ours.dtype == dtype
    assert difference(ours, tensors("vision_BIAS-TINY")["visual_query"]) <= query_limit("BIAS-TINY", dtype=dtype)
