"""The encoder as torch runs it."""

import numpy as np
import pytest
import torch

from tests.fakes.exported import embedded_encoder, sample_pixels
from vision.backends.torch import TorchVisionBackend


@pytest.mark.parametrize("num_pictures", [1, 3, 4, 7, 9])
def test_batches_are_filled_up_to_the_sizes_there_are(num_pictures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = embedded_encoder()
    plain = TorchVisionBackend(encoder, device=torch.device("cpu"))
    filled = TorchVisionBackend(encoder, device=torch.device("cpu"), batch_sizes=(1, 4, 8))
    pixels = np.ascontiguousarray(sample_pixels()[:num_pictures])
    expected = plain.encode(pixels)
    given: list[int] = []
    handle = encoder.register_forward_pre_hook(lambda _, inputs: given.append(len(inputs[0])))
    try:
        ours = filled.encode(pixels)
    finally:
        handle.remove()

    assert given == [{1: 1, 3: 4, 4: 4, 7: 8, 9: 9}[num_pictures]]
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
