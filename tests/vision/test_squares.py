"""Pictures are cut into squares as by transformers' processors of Idefics3 and SmolVLM."""

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.session import GraphInfo
from llama_adapter.vision.backends.exported import ExportedEncoder
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess
from llama_adapter.vision.squares import grid_of, squares_of
from tests.fakes.towers import CONNECTORS, TOWERS

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


# The graph of a connector gets few squares in a call, because a prompt may have many


class Session:
    """A graph whose every output of a square is the square's first pixel."""

    device_ms = None

    def __init__(self, config: VisionConfig, batch_sizes: tuple[int, ...] | None, *, has_card: bool) -> None:
        card = EncoderCard(name="toy", vision=config, dtype="float32", opset=0, fingerprint={})
        self.shape, self.calls = card.output_shape, list[int]()
        self.info = GraphInfo(
            name="toy",
            file="toy.onnx",
            inputs=(Port(dtype="float32", shape=(-1, *card.input_shape)),),
            outputs=(Port(dtype="float32", shape=(-1, *card.output_shape)),),
            card=card.to_graph() if has_card else None,
            batch_sizes=batch_sizes,
            hint="",
        )

    def run(self, inputs: Any) -> list[np.ndarray]:
        [pixels_BHWC] = inputs
        self.calls.append(len(pixels_BHWC))
        return [np.broadcast_to(pixels_BHWC[:, :1, :1, 0], (len(pixels_BHWC), *self.shape)).astype(np.float32)]

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("config", "batch_sizes", "calls"),
    [
        (CONNECTORS["SmolVLM"], None, [8, 8, 4]),
        (CONNECTORS["LLaVA"], None, [8, 8, 4]),
        (CONNECTORS["SmolVLM"], (4,), [20]),  # its session divides them
        (next(iter(TOWERS.values())), None, [20]),
    ],
    ids=["any batch", "one square of each picture", "a fixed batch", "an adapter's encoder"],
)
@pytest.mark.parametrize("has_card", [True, False])
def test_squares_of_a_call(
    config: VisionConfig, batch_sizes: tuple[int, ...] | None, calls: list[int], has_card: bool
) -> None:
    session: Any = Session(config, batch_sizes, has_card=has_card)
    squares = np.zeros((20, *session.info.inputs[0].shape[1:]), np.uint8)
    squares[:] = np.arange(20, dtype=np.uint8)[:, None, None, None]

    encoder = ExportedEncoder(session)
    assert encoder.vision == (config if has_card else None)
    encoder.vision = config
    made = encoder.encode(squares)

    assert made[:, 0, 0].tolist() == list(range(20))
    assert session.calls == calls
