"""The encoder as torch runs it."""

import numpy as np
import pytest
import torch

from llama_adapter.vision.backends.torch import TorchVisionBackend
from tests.fakes.exported import embedded_encoder, sample_pixels

CPU = torch.device("cpu")


def numbers_given_to(backend: TorchVisionBackend, pixels: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """The visual query, and how many pictures each call of the module had."""
    given: list[int] = []
    handle = backend.module.register_forward_pre_hook(lambda _, inputs: given.append(len(inputs[0])))
    try:
        return backend.encode(pixels), given
    finally:
        handle.remove()


@pytest.mark.parametrize("num_pictures", [1, 3, 4, 7, 9])
def test_batches_are_filled_up_to_the_sizes_there_are(num_pictures: int) -> None:
    encoder = embedded_encoder()
    plain = TorchVisionBackend(encoder, device=CPU)
    filled = TorchVisionBackend(encoder, device=CPU, batch_sizes=(1, 4, 8))
    pixels = np.ascontiguousarray(sample_pixels()[:num_pictures])
    expected = plain.encode(pixels)

    ours, given = numbers_given_to(filled, pixels)

    assert given == [{1: 1, 3: 4, 4: 4, 7: 8, 9: 9}[num_pictures]]
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_many_pictures_are_encoded_in_calls_of_even_size_and_stay_in_order() -> None:
    encoder = embedded_encoder()
    pixels = np.ascontiguousarray(sample_pixels()[:7])
    expected = TorchVisionBackend(encoder, device=CPU, largest_batch=7).encode(pixels)

    ours, given = numbers_given_to(TorchVisionBackend(encoder, device=CPU, largest_batch=3), pixels)

    assert given == [3, 2, 2]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_no_pictures_give_no_visual_queries() -> None:
    backend = TorchVisionBackend(embedded_encoder(), device=CPU)
    one = backend.encode(sample_pixels()[:1])

    assert backend.encode(sample_pixels()[:0]).shape == (0, *one.shape[1:])
