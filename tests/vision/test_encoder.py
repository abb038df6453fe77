"""Other forms of the encoder's parts compute the same as the plain ones."""

import dataclasses

import pytest
import torch

from llama_adapter.vision.block import Mlp, ScaledMlp
from llama_adapter.vision.config import ChannelOrder, ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, scale_activations
from llama_adapter.vision.pixels import zero_picture
from tests.bounds import FACTOR, Float64, largest, unit
from tests.fakes.exported import sample_pixels

CONFIG = VisionConfig(
    clip=ClipConfig(image_size=224, patch_size=56, width=32, num_layers=2, num_heads=2, output_dim=16),
    query=QueryConfig(num_queries=3, width=16, depth=1, num_heads=2, mlp_dim=32, output_dim=8),
)


def random_encoder(config: VisionConfig = CONFIG, *, dtype: torch.dtype = torch.float32) -> PictureEncoder:
    torch.manual_seed(0)
    return PictureEncoder(config).to(dtype).eval().requires_grad_(False)


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


@pytest.mark.parametrize("channel_order", ["rgb", "bgr"])
def test_the_picture_of_zeros_is_zero_after_normalisation(channel_order: ChannelOrder) -> None:
    encoder = PictureEncoder(dataclasses.replace(CONFIG, channel_order=channel_order))
    pixels_BHWC = torch.from_numpy(zero_picture(encoder.config.clip.pixels, channel_order=channel_order)[None].copy())

    # A quotient of at most 1 is subtracted from itself, and the rest is divided.
    assert largest(encoder.normalise(pixels_BHWC)) <= 4 * unit(torch.float32) / float(encoder.std.min())
