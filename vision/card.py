"""The card of an exported picture encoder: the sizes of its `VisionConfig` beside what every graph's card has."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from llama_adapter.runtime.graphs.card import GraphCard, GraphDtype, card_error
from llama_adapter.runtime.json_object import check_fields
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig

INPUT, OUTPUT = "input", "output"  # names in the graph, as in the Ascend guide
GRAPH_NAME = "llama_adapter_rgb_encoder"  # in the names of all nodes, which stay in an OM that ATC makes


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCard:
    """Pixels (B, S, S, 3) RGB, 0..255, in `dtype` -> visual query (B, Q, D) in `dtype`.

    Normalisation, and the channel order of the training, are inside the graph.
    """

    name: str  # of the model, for people
    vision: VisionConfig
    dtype: GraphDtype
    opset: int
    fingerprint: Mapping[str, str]  # of the halves `clip` and `query`

    @classmethod
    def from_graph(cls, card: GraphCard, *, file: str) -> "EncoderCard":
        """Raises GraphError, which names `file`, for sizes that are no picture encoder's."""
        try:
            if card.part != "vision":
                raise ValueError(f"it is that of another part of a model, {card.part}")
            vision = read_vision_config(card.config)
        except ValueError as error:
            raise card_error(file, error) from None
        return cls(name=card.name, vision=vision, dtype=card.dtype, opset=card.opset, fingerprint=card.fingerprint)

    def to_graph(self) -> GraphCard:
        """Inverse of `from_graph`."""
        return GraphCard(
            part="vision",
            name=self.name,
            config=self.vision.to_dict(),
            dtype=self.dtype,
            opset=self.opset,
            fingerprint=self.fingerprint,
        )

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(S, S, 3): one picture as the graph takes it."""
        side = self.vision.clip.image_size
        return side, side, 3

    @property
    def output_shape(self) -> tuple[int, int]:
        """(Q, D): the visual query of one picture."""
        return self.vision.query.num_queries, self.vision.query.output_dim


def read_vision_config(values: Mapping[str, Any]) -> VisionConfig:
    """The configuration in a file. Raises ValueError for missing, unknown and wrong fields."""
    check_fields(values, {"clip": dict, "query": dict, "channel_order": str}, what="vision")
    for half, kind in (("clip", ClipConfig), ("query", QueryConfig)):
        check_fields(values[half], dict.fromkeys((field.name for field in fields(kind)), int), what=half)
    return VisionConfig.from_dict(values)
