"""The card of an exported picture encoder: the fields of every graph's card, and the sizes of its `VisionConfig`."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from llama_adapter.runtime.graphs.card import GraphCard, GraphDtype, card_error
from llama_adapter.runtime.json_object import check_fields
from llama_adapter.vision.config import ClipConfig, ConnectorConfig, QueryConfig, VisionConfig

INPUT, OUTPUT = "input", "output"  # names of input and output in the graph, as in the Ascend guide
GRAPH_NAME = "llama_adapter_rgb_encoder"  # prefix of the names of all nodes, which an OM of ATC still contains


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderCard:
    """Describes a graph from pixels (B, S, S, 3) RGB, 0..255, in `dtype` to visual queries (B, Q, D) in `dtype`.

    With a connector, the latter are tokens of the language model. The graph also contains the normalisation and the
    conversion to the channel order of the training.
    """

    name: str  # the model's name, for people
    vision: VisionConfig
    dtype: GraphDtype
    opset: int
    fingerprint: Mapping[str, str]  # of the halves `clip` and `query`

    @classmethod
    def from_graph(cls, card: GraphCard, *, file: str) -> "EncoderCard":
        """The card of a picture encoder. Raises GraphError, which names `file`, if `card` is not one."""
        try:
            vision = read_vision_config(card.config)
        except ValueError as error:
            raise card_error(file, error) from None
        return cls(name=card.name, vision=vision, dtype=card.dtype, opset=card.opset, fingerprint=card.fingerprint)

    def to_graph(self) -> GraphCard:
        """Inverse of `from_graph`."""
        return GraphCard(
            name=self.name,
            config=self.vision.to_dict(),
            dtype=self.dtype,
            opset=self.opset,
            fingerprint=self.fingerprint,
        )

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(S, S, 3): the shape of one input picture."""
        side = self.vision.clip.image_size
        return side, side, 3

    @property
    def output_shape(self) -> tuple[int, int]:
        """(Q, D): the shape of the visual query of one picture."""
        return self.vision.query.num_queries, self.vision.query.output_dim


def read_vision_config(values: Mapping[str, Any]) -> VisionConfig:
    """The configuration from the JSON values of a file. Raises ValueError for missing, unknown and wrong fields."""
    check_fields(values, {"clip": dict, "query": dict, "channel_order": str}, what="vision")
    query, others = (
        ConnectorConfig if "shuffle" in values["query"] else QueryConfig,
        {"activation": str, "has_bias": bool},
    )
    check_fields(values["query"], {one.name: others.get(one.name, int) for one in fields(query)}, what="query")
    sizes = {field.name for field in fields(ClipConfig) if field.default is MISSING or field.name == "image_size"}
    switches = {field.name for field in fields(ClipConfig)}.intersection(values["clip"]) - sizes
    kinds = dict.fromkeys(sizes, int) | dict.fromkeys(switches, (bool, int, float, str, list))
    check_fields(values["clip"], kinds, what="clip")
    return VisionConfig.from_dict(values)
