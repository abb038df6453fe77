"""The encoder in torch, and the number of pictures that the host encodes in one call."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.devices.programs import GraphMode
from llama_adapter.vision.backends.batches import USUAL_CACHE_BYTES, best_batch_size, even_batches, last_cache_bytes
from llama_adapter.vision.backends.torch import TorchVisionBackend
from llama_adapter.vision.block import Mlp, ScaledMlp
from llama_adapter.vision.config import ChannelOrder, ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, scale_activations
from llama_adapter.vision.pixels import zero_picture
from tests.bounds import FACTOR, Float64, difference, largest, unit
from tests.fakes import cuda_graphs
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.fakes.exported import embedded_encoder, query_limit, sample_pixels

CPU = torch.device("cpu")
cuda = cuda_graphs.cuda  # a fixture


def numbers_given_to(backend: TorchVisionBackend, pixels: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """The visual query, and the number of pictures in each call of the module."""
    given: list[int] = []
    handle = backend.module.register_forward_pre_hook(lambda _, inputs: given.append(len(inputs[0])))
    try:
        return backend.encode(pixels), given
    finally:
        handle.remove()


@pytest.mark.parametrize("num_pictures", [1, 3, 4, 7, 9])
def test_batches_are_padded_to_the_given_sizes(num_pictures: int) -> None:
    encoder = embedded_encoder()
    plain = TorchVisionBackend(encoder, device=CPU)
    filled = TorchVisionBackend(encoder, device=CPU, batch_sizes=(1, 4, 8))
    pixels = np.ascontiguousarray(sample_pixels()[:num_pictures])
    expected = plain.encode(pixels)

    ours, given = numbers_given_to(filled, pixels)

    assert given == [{1: 1, 3: 4, 4: 4, 7: 8, 9: 9}[num_pictures]]
    assert ours.shape == expected.shape
    assert difference(ours, expected) <= query_limit()


@pytest.mark.proves("any number of pictures", "CPU")
def test_many_pictures_are_encoded_in_calls_of_even_size_and_stay_in_order() -> None:
    encoder = embedded_encoder()
    pixels = np.ascontiguousarray(sample_pixels()[:7])
    expected = TorchVisionBackend(encoder, device=CPU, largest_batch=7).encode(pixels)

    ours, given = numbers_given_to(TorchVisionBackend(encoder, device=CPU, largest_batch=3), pixels)

    assert given == [3, 2, 2]
    assert difference(ours, expected) <= query_limit()


def test_a_number_of_pictures_that_occurs_again_is_recorded(cuda: FakeCuda) -> None:
    gpu, encoder = HostCuda(), embedded_encoder()
    plain = TorchVisionBackend(encoder, device=CPU, largest_batch=7)
    recording = TorchVisionBackend(encoder, device=CPU, largest_batch=7, mode=GraphMode(gpu, "cuda_graph"))
    pixels = np.ascontiguousarray(sample_pixels()[:7])
    encoded = []
    for part, num_captures in (((0, 2), 0), ((2, 5), 0), ((2, 4), 1), ((4, 6), 1), ((3, 6), 2), ((5, 7), 2)):
        chosen = pixels[slice(*part)]
        encoded.append((recording.encode(chosen), plain.encode(chosen)))
        assert cuda.num_captures() == num_captures

    floats = pixels[:2] + np.float32(0.4)
    for part, num_captures in ((floats, 2), (floats, 3), (pixels[:2], 3)):  # a recording is for one type of pixels
        encoded.append((recording.encode(part), plain.encode(part)))
        assert cuda.num_captures() == num_captures

    for ours, expected in encoded:  # later graphs have not changed earlier results
        assert difference(ours, expected) <= query_limit()


def test_recorded_calls_are_full_so_that_few_sizes_occur(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.vision.backends.torch.MOST_RECORDED", 3)
    encoder = embedded_encoder()
    recording = TorchVisionBackend(encoder, device=CPU, mode=GraphMode(HostCuda(), "cuda_graph"))
    pixels = np.ascontiguousarray(sample_pixels()[:8])
    expected = TorchVisionBackend(encoder, device=CPU, largest_batch=8).encode(pixels)

    ours, given = numbers_given_to(recording, pixels)

    assert (given[0], given[-1], cuda.num_captures()) == (3, 2, 1)  # the second call of three is the first recording
    assert difference(ours, expected) <= query_limit()


@pytest.mark.parametrize("mode", [None, GraphMode(CpuBackend(), "eager")])
def test_no_pictures_give_no_visual_queries(mode: GraphMode | None) -> None:
    backend = TorchVisionBackend(embedded_encoder(), device=CPU, mode=mode)
    one = backend.encode(sample_pixels()[:1])

    assert backend.encode(sample_pixels()[:0]).shape == (0, *one.shape[1:])


@given(st.integers(1, 300), st.integers(1, 40))
def test_calls_are_few_and_of_even_size(num_pictures: int, largest: int) -> None:
    sizes = even_batches(num_pictures, largest=largest)

    assert sum(sizes) == num_pictures
    assert max(sizes) <= largest
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num_pictures // largest)


def test_the_widest_activations_of_a_batch_take_a_quarter_of_the_cache() -> None:
    config = embedded_encoder().config
    cache_bytes = 10 << 20
    tokens = 1 + config.clip.num_patches + config.query.num_queries
    picture_bytes = 4 * tokens * config.query.mlp_dim

    best = best_batch_size(config, itemsize=4, cache_bytes=cache_bytes)

    assert best * picture_bytes <= cache_bytes / 4 < (best + 1) * picture_bytes
    assert best_batch_size(config, itemsize=2, cache_bytes=cache_bytes) // 2 == best
    assert best_batch_size(config, itemsize=4, cache_bytes=1) == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["48K", "1024K", "32768K"], 32 << 20),
        (["32K", "4M"], 4 << 20),
        (["", "odd", "4X"], USUAL_CACHE_BYTES),
        ([], USUAL_CACHE_BYTES),
    ],
)
def test_the_largest_cache_of_the_system_counts(texts: list[str], expected: int, tmp_path: Path) -> None:
    for index, text in enumerate(texts):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text + "\n")

    assert last_cache_bytes(tmp_path) == expected


# Other forms of the encoder's parts compute the same as the plain ones

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
