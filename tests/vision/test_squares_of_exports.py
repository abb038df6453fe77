"""The graph of a connector gets few squares in a call, because a prompt may have many."""

from typing import Any

import numpy as np
import pytest

from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.session import GraphInfo
from llama_adapter.vision.backends.exported import ExportedEncoder
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VisionConfig
from tests.fakes.towers import CONNECTORS, TOWERS


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
