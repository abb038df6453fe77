"""The picture encoder as an exported graph, run by any graph session."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.open_session import GraphSpec, open_session
from llama_adapter.runtime.graphs.session import GraphSession
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import ChannelOrder, ConnectorConfig, VisionConfig
from llama_adapter.vision.pixels import PixelRule

_FLOATS = ("float32", "float16")
_PIXELS = (np.uint8, np.float32)
# Of one call of a connector's graph, because prompts have any number of pictures, and one that is cut has up to 17
# squares. On a CPU, 8 squares in the size of SmolVLM-256M's take 0.7 GB, and each 1.1 times as long as one alone; 17
# take 2.5 GB and 1.2 times, 34 take 5.2 GB.
_MOST_SQUARES: Final = 8


class ExportedEncoder:
    """A `VisionBackend` whose weights are in an ONNX or OM file, from our export or from another program.

    The graph takes pixels 0..255 (B, S, S, 3) and normalises them itself. `channel_order` is the order of its input
    channels; graphs of our export take RGB. `vision` is the configuration in its card; without a card, None until that
    of the model is set. `query_shape` is (Q, D), with -1 for a size that the graph does not state.
    """

    channel_order: ChannelOrder = "rgb"

    def __init__(self, session: GraphSession) -> None:
        """Raises GraphError if the graph is not a picture encoder, or differs from its card."""
        self.session = session
        info = session.info
        self.name, self.batch_sizes = info.name, info.batch_sizes
        self.card = None if info.card is None else EncoderCard.from_graph(info.card, file=info.file)
        self.image_size = _check_pixels_port(info.inputs, file=info.file, hint=info.hint)
        self.query_shape = _check_query_port(info.outputs, file=info.file, hint=info.hint)
        self.vision: VisionConfig | None = None if self.card is None else self.card.vision
        if self.card is not None:
            _check_card(self.card, side=self.image_size, query=self.query_shape, file=info.file)

    @property
    def pixels(self) -> PixelRule:
        """How pictures become the pixels that the graph takes: by the rule of OpenAI's CLIP if `vision` is None."""
        return PixelRule(image_size=self.image_size) if self.vision is None else self.vision.clip.pixels

    @property
    def device_ms(self) -> float | None:
        """Milliseconds of the last `encode` on the device; None if they are not measured."""
        return self.session.device_ms

    def encode(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """As `VisionBackend.encode`: a writable array in the graph's dtype. B is at least 1.

        Raises GraphError for pixels of another shape or dtype, and if the graph or its runtime fails.
        """
        given, side = pixels_BHWC.shape, self.image_size
        if pixels_BHWC.dtype not in _PIXELS or len(given) != 4 or given[1:] != (side, side, 3) or not given[0]:
            raise GraphError(
                f"`{self.session.info.file}` encodes uint8 or float32 (B, {side}, {side}, 3) with B at least 1, "
                f"and was given {Port(name='', dtype=str(pixels_BHWC.dtype), shape=given)}",
                hint="resize and crop with `vision.preprocess.preprocess`; height, width, colour in this order",
            )
        pixels_BHWC = pixels_BHWC if self.channel_order == "rgb" else pixels_BHWC[..., ::-1]
        has_connector = self.vision is not None and isinstance(self.vision.query, ConnectorConfig)
        is_divided = has_connector and self.batch_sizes is None  # otherwise, the session divides batches
        starts = range(0, len(pixels_BHWC), _MOST_SQUARES if is_divided else len(pixels_BHWC))
        parts = [self.session.run([part_BHWC])[0] for part_BHWC in np.split(pixels_BHWC, starts[1:])]
        query = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return query if query.flags.writeable else query.copy()  # torch shares no memory that cannot be written

    def close(self) -> None:
        """Release memory, device, thread and process. May be repeated."""
        self.session.close()


def open_encoder(spec: GraphSpec) -> ExportedEncoder:
    """Load and check the encoder of `spec`, without a warm-up. Raises GraphError."""
    session = open_session(spec)
    try:
        return ExportedEncoder(session)
    except BaseException:
        session.close()
        raise


def _check_pixels_port(ports: Sequence[Port], *, file: str, hint: str) -> int:
    """The side of the pictures that the graph's only input takes."""
    port = _only(ports, "input", file=file, hint=hint)
    shape = port.shape
    if len(shape) != 4 or shape[3] != 3 or shape[1] != shape[2] or shape[1] <= 0:
        layout = ""
        if len(shape) == 4 and shape[1] == 3:
            # The number of bytes is the same, so a runtime that checks only this would run it and return noise.
            layout = ": colour stands before height and width (NCHW), so pixels would be read in the wrong order"
        raise GraphError(f"`{file}` takes {port}, and pictures are given as (B, S, S, 3){layout}", hint=hint)
    if port.dtype not in _FLOATS:
        advice = "; preprocessing compiled into the file (AIPP) is not used here" if port.dtype == "uint8" else ""
        raise GraphError(
            f"`{file}` takes pixels of {port.dtype}, and an encoder takes float32 or float16", hint=hint + advice
        )
    return shape[1]


def _check_query_port(ports: Sequence[Port], *, file: str, hint: str) -> tuple[int, ...]:
    """(Q, D) of the visual query that the graph's only output returns; -1 for a size that the graph does not state."""
    port = _only(ports, "output", file=file, hint=hint)
    if len(port.shape) != 3 or port.dtype not in _FLOATS:
        raise GraphError(
            f"`{file}` gives {port}, and an encoder gives a visual query of float32 or float16 (B, Q, D)", hint=hint
        )
    return port.shape[1:]


def _only(ports: Sequence[Port], kind: str, *, file: str, hint: str) -> Port:
    if len(ports) != 1:
        names = ", ".join(f"{port.name} {port}" for port in ports)
        raise GraphError(f"`{file}` has {len(ports)} {kind}s, and an encoder has one: {names}", hint=hint)
    return ports[0]


def _check_card(card: EncoderCard, *, side: int, query: tuple[int, ...], file: str) -> None:
    differs = any(have not in (-1, want) for have, want in zip(query, card.output_shape, strict=True))
    if side != card.input_shape[0] or differs:
        raise GraphError(
            f"The card of `{file}` says {card.output_shape} from pictures of {card.input_shape[0]} pixels, and its "
            f"graph makes {query} from {side} pixels",
            hint="the file was changed after its export: export the encoder again",
        )
