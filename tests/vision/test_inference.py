"""The encoder for the host gives the same results as the plain one."""

import dataclasses

import pytest
import torch

from llama_adapter.vision.block import Mlp, fused_attention, plain_attention
from llama_adapter.vision.config import ChannelOrder, ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.inference import (
    FoldedPatches,
    HostEncoder,
    ScaledMlp,
    attention_for,
    bfloat16_attention,
    scale_activations,
)
from llama_adapter.vision.pixels import zero_picture
from tests.bounds import FACTOR, Float64, largest, sums, unit
from tests.fakes.exported import sample_pixels
from tests.fakes.towers import TOWERS

CONFIG = VisionConfig(
    clip=ClipConfig(image_size=224, patch_size=56, width=32, num_layers=2, num_heads=2, output_dim=16),
    query=QueryConfig(num_queries=3, width=16, depth=1, num_heads=2, mlp_dim=32, output_dim=8),
)


def random_encoder(config: VisionConfig = CONFIG, *, dtype: torch.dtype = torch.float32) -> PictureEncoder:
    torch.manual_seed(0)
    return PictureEncoder(config).to(dtype).eval().requires_grad_(False)


FOLDED = {"rgb": CONFIG, "bgr": dataclasses.replace(CONFIG, channel_order="bgr"), **TOWERS}


@pytest.mark.parametrize("config", FOLDED.values(), ids=FOLDED)
def test_folded_patches_are_normalisation_and_embedding(config: VisionConfig) -> None:
    encoder, size, patch = random_encoder(config), config.clip.image_size, config.clip.patch_size
    pixels = torch.from_numpy(sample_pixels()[:2, :size, :size])

    expected = encoder.clip.patch_embedding(encoder.normalise(pixels)).flatten(2).transpose(1, 2)

    folded, patches = FoldedPatches(encoder), pixels.float().unfold(1, patch, patch)
    patches = patches.unfold(2, patch, patch).permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)
    assert bool((abs(folded(pixels) - expected) <= sums(patches, folded.linear.weight, folded.linear.bias)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_host_encoder_is_as_close_to_float32_as_the_plain_one(dtype: torch.dtype) -> None:
    pixels = torch.from_numpy(sample_pixels()[:3])
    with Float64():
        exact = random_encoder(dtype=torch.float64)(pixels)
    plain_error = (random_encoder(dtype=dtype)(pixels) - exact).square().mean().sqrt()

    ours = HostEncoder(random_encoder(dtype=dtype))(pixels)

    assert ours.dtype == dtype
    assert (ours - exact).square().mean().sqrt() < FACTOR * plain_error


def test_the_original_encoder_stays_unchanged_and_shares_its_tensors() -> None:
    encoder = random_encoder(dtype=torch.bfloat16)
    pixels = torch.from_numpy(sample_pixels()[:1])
    before = encoder(pixels)
    parts = [(block.mlp.activation, block.attention.attend) for block in encoder.clip.blocks]

    ours = HostEncoder(encoder)
    ours.clip.blocks[1] = torch.nn.Identity()

    assert torch.equal(encoder(pixels), before)
    assert [(block.mlp.activation, block.attention.attend) for block in encoder.clip.blocks] == parts
    assert ours.clip.blocks[0].mlp.up.weight is encoder.clip.blocks[0].mlp.up.weight
    assert ours.query.queries is encoder.query.queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scaled_activation_is_as_close_to_float32_as_the_plain_one(dtype: torch.dtype) -> None:
    pixels = torch.from_numpy(sample_pixels()[:3])
    with Float64():
        exact = random_encoder(dtype=torch.float64)(pixels)
    encoder = random_encoder(dtype=dtype)
    plain_error = (encoder(pixels) - exact).square().mean().sqrt()

    scale_activations(encoder)

    kinds = [type(block.mlp) for block in (*encoder.clip.blocks, *encoder.query.blocks)]
    assert kinds == [ScaledMlp, ScaledMlp, Mlp]  # the last one has another activation
    ours = encoder(pixels)
    assert ours.dtype == dtype
    assert (ours - exact).square().mean().sqrt() < FACTOR * plain_error


def test_products_of_bfloat16_are_softmax_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(bfloat16_attention(q, k, v), plain_attention(q, k, v))


@pytest.mark.parametrize("has_instructions", [True, False])
def test_bfloat16_uses_plain_products_if_the_processor_has_instructions_for_it(
    has_instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)

    assert attention_for(torch.bfloat16) is (bfloat16_attention if has_instructions else fused_attention)
    assert attention_for(torch.float32) is attention_for(torch.float16) is fused_attention


@pytest.mark.parametrize("channel_order", ["rgb", "bgr"])
def test_the_picture_of_zeros_is_zero_after_normalisation(channel_order: ChannelOrder) -> None:
    encoder = PictureEncoder(dataclasses.replace(CONFIG, channel_order=channel_order))
    pixels_BHWC = torch.from_numpy(zero_picture(encoder.config.clip.pixels, channel_order=channel_order)[None].copy())

    # A quotient of at most 1 is subtracted from itself, and the rest is divided.
    assert largest(encoder.normalise(pixels_BHWC)) <= 4 * unit(torch.float32) / float(encoder.std.min())
