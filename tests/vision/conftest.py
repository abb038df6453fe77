"""Encoders of the golden checkpoints, exported once for all tests that only read the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.export import export_onnx
from tests.parity.golden import PICTURES, model, pixels


class Exported(NamedTuple):
    path: Path
    card: EncoderCard
    encoder: PictureEncoder
    pixels: Any  # uint8 (B, 224, 224, 3)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """`exported(order, dtype, opset)`."""
    made: dict[tuple[str, str, int], Exported] = {}

    def export(order: str = "rgb", dtype: Any = "float32", opset: int = 18) -> Exported:
        key = (order, dtype, opset)
        if key not in made:
            encoder = model("BIAS-TINY", channel_order=order).encoder
            path = tmp_path_factory.mktemp("onnx") / "clip.onnx"
            card = export_onnx(encoder.config, encoder.state_dict(), path, name="tiny", dtype=dtype, opset=opset)
            made[key] = Exported(path, card, encoder, pixels(PICTURES[:4]).numpy())
        return made[key]

    return export
