"""Pictures are cut into squares as by transformers' processors of Idefics3 and SmolVLM."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess
from llama_adapter.vision.squares import grid_of, squares_of

SIDE, HALF = 32, (0.5, 0.5, 0.5)
SIZES = [(128, 128), (40, 30), (31, 77), (300, 1), (2, 90), (129, 127), (64, 200), (1, 1)]


@pytest.mark.parametrize("longest", [128, 100, 32, 20])
@pytest.mark.parametrize("splits", [True, False])
def test_squares_are_those_of_transformers(longest: int, splits: bool) -> None:
    theirs = SmolVLMImageProcessorPil(
        size={"longest_edge": longest},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=splits,
        image_mean=HALF,
        image_std=HALF,
        return_row_col_info=True,
    )
    rule = PixelRule(
        image_size=SIDE,
        resample="lanczos",
        is_squashed=not splits,
        rgb_first=True,
        longest=longest,
        mean=HALF,
        std=HALF,
    )
    draw = np.random.default_rng(0)
    for width, height in SIZES:
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        expected = theirs(images=image, return_tensors="np")

        sheet = preprocess(image, rule=rule)

        squares = np.stack(squares_of(sheet, side=SIDE)).transpose(0, 3, 1, 2)
        assert grid_of(sheet, side=SIDE) == (expected["rows"][0][0], expected["cols"][0][0])
        np.testing.assert_allclose(squares / 127.5 - 1, expected["pixel_values"][0], atol=1e-6)
        assert max(sheet.shape) <= rule.most_side
        assert not any(length % SIDE for length in sheet.shape[:2])
