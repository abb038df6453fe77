"""The graph of an encoder gets few squares in a call, where a batch of pictures that are cut has many."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.session import GraphInfo
from llama_adapter.vision.backends.exported import ExportedEncoder
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VisionConfig
from tests.fakes.towers import CONNECTORS

CUT = replace(CONNECTORS["SmolVLM"], clip=replace(CONNECTORS["SmolVLM"].clip, is_squashed=False, longest=120))


class Session:
    """A graph whose every output of a square is the square's first pixel."""

    device_ms = None

    def __init__(self, config: VisionConfig, batch_sizes: tuple[int, ...] | None) -> None:
        card = EncoderCard(name="toy", vision=config, dtype="float32", opset=0, fingerprint={})
        self.shape, self.calls = card.output_shape, list[int]()
        self.info = GraphInfo(
            name="toy",
            file="toy.onnx",
            inputs=(Port(dtype="float32", shape=(-1, *card.input_shape)),),
            outputs=(Port(dtype="float32", shape=(-1, *card.output_shape)),),
            card=card.to_graph(),
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
        (CUT, None, [8, 8, 4]),
        (CUT, (4,), [20]),  # its session divides them
        (CONNECTORS["LLaVA"], None, [20]),
    ],
    ids=["any batch", "a fixed batch", "pictures that are not cut"],
)
def test_squares_of_a_call(config: VisionConfig, batch_sizes: tuple[int, ...] | None, calls: list[int]) -> None:
    session: Any = Session(config, batch_sizes)
    squares = np.zeros((20, *session.info.inputs[0].shape[1:]), np.uint8)
    squares[:] = np.arange(20, dtype=np.uint8)[:, None, None, None]

    made = ExportedEncoder(session).encode(squares)

    assert made[:, 0, 0].tolist() == list(range(20))
    assert session.calls == calls
