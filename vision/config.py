"""Sizes of the vision half of the model, as plain values: no tensors, no file names."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

ChannelOrder = Literal["rgb", "bgr"]
_MAY_BE_ZERO = ("depth",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """The vision tower of CLIP (Radford et al., 2021)."""

    image_size: int = 224
    patch_size: int
    width: int
    num_layers: int
    num_heads: int
    output_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} must be a multiple of patch_size {self.patch_size}")
        if self.width % self.num_heads:
            raise ValueError(f"CLIP width {self.width} must be a multiple of num_heads {self.num_heads}")

    @property
    def num_patches(self) -> int:
        """Patches of one picture, without the class token."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryConfig:
    """The visual-query blocks of LLaMA-Adapter V2. The released 7B models have 10 queries, width 768 and depth 8."""

    num_queries: int
    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    output_dim: int  # the width of the language model that reads the queries

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} of the visual blocks must be a multiple of num_heads {self.num_heads}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """All sizes and settings that a `PictureEncoder` needs, except its weights."""

    clip: ClipConfig
    query: QueryConfig
    channel_order: ChannelOrder = "rgb"  # order that the weights were trained on; input pixels are always RGB

    def __post_init__(self) -> None:
        if self.channel_order not in get_args(ChannelOrder):
            raise ValueError(f"channel_order must be rgb or bgr, got {self.channel_order!r}")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as stored in a bundle's manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "VisionConfig":
        """Inverse of `to_dict`.

        Raises TypeError or KeyError for unknown or missing fields, ValueError for bad values.
        """
        return cls(
            clip=ClipConfig(**values["clip"]),
            query=QueryConfig(**values["query"]),
            channel_order=values["channel_order"],
        )


def _check_sizes(config: ClipConfig | QueryConfig) -> None:
    """Raise ValueError unless every field is an integer of at least 1, or 0 for fields in _MAY_BE_ZERO."""
    for field in fields(config):
        value, least = getattr(config, field.name), 0 if field.name in _MAY_BE_ZERO else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{field.name} must be a whole number, at least {least}, got {value!r}")


VIT_L_14 = ClipConfig(patch_size=14, width=1024, num_layers=24, num_heads=16, output_dim=768)  # used by the adapters
