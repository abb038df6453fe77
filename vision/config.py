"""Sizes and switches of the vision half of the model, as plain values: no tensors, no file names."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Literal, get_args, get_origin, get_type_hints

from llama_adapter.vision.pixels import PixelRule

ChannelOrder = Literal["rgb", "bgr"]
Activation = Literal["quick_gelu", "exact_gelu", "gelu_tanh"]
# Norms, and the one linear layer beside each that reads it; see schemes/balancing.py.
NORM_READERS: Final = {"norm1": "attention.qkv", "norm2": "mlp.up", "post_norm": "projection"}
LAYER_NORM_EPS = 1e-5  # of the visual-query blocks; newer timm releases default to 1e-6, which gives other results
_MAY_BE_ZERO = ("depth", "longest", "margin", "mlp_dim", "num_class_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig(PixelRule):
    """A vision tower: a ViT with the switches in which CLIP, SigLIP and DINOv2 differ. The defaults are OpenAI's CLIP.

    Its features are `num_features` tokens of width `output_dim`. All towers have CLIP's name in files and flags.
    """

    patch_size: int
    width: int
    num_layers: int
    num_heads: int
    output_dim: int
    mlp_dim: int = 0  # 0: four times the width
    activation: Activation = "quick_gelu"
    norm_eps: float = 1e-5
    num_class_tokens: int = 1  # the class token and registers, which precede the patches
    has_patch_bias: bool = False
    has_pre_norm: bool = True  # before the blocks
    has_post_norm: bool = True  # after the blocks, of all tokens
    has_projection: bool = True  # after that; without it, `output_dim` is the width
    drops_class: bool = False  # the features are those of the patches alone

    def __post_init__(self) -> None:
        _check_values(self)
        if not self.num_patches:
            raise ValueError(f"image_size {self.image_size} must be at least patch_size {self.patch_size}")
        if self.width % self.num_heads:
            raise ValueError(f"CLIP width {self.width} must be a multiple of num_heads {self.num_heads}")
        if not self.has_projection and self.output_dim != self.width:
            raise ValueError(f"output_dim {self.output_dim} must be width {self.width} without a projection")
        if not self.norm_eps > 0 or not all(std > 0 for std in self.std):
            raise ValueError("norm_eps and std must be positive")

    @property
    def pixels(self) -> PixelRule:
        """How pictures become the pixels that the tower takes."""
        return PixelRule(**{field.name: getattr(self, field.name) for field in fields(PixelRule)})

    @property
    def patches_per_side(self) -> int:
        """Patches in a row of one picture. Pixels beyond the last whole patch are not read."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches of one picture, without class tokens."""
        return self.patches_per_side**2

    @property
    def num_tokens(self) -> int:
        """Tokens that the blocks compute."""
        return self.num_patches + self.num_class_tokens

    @property
    def num_features(self) -> int:
        """Tokens of the features."""
        return self.num_patches if self.drops_class else self.num_tokens

    @property
    def hidden_dim(self) -> int:
        """The width between the two linear layers of a block's MLP."""
        return self.mlp_dim or 4 * self.width


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
        _check_values(self)
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} of the visual blocks must be a multiple of num_heads {self.num_heads}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectorConfig:
    """A connector in place of visual-query blocks: it turns features into tokens of the language model.

    LLaVA-1.5 (Liu et al., 2023) has two linear layers. Idefics3 (Laurençon et al., 2024) and SmolVLM join
    `shuffle` x `shuffle` neighbouring patches, and have one linear layer.
    """

    num_heads: ClassVar[int] = 1
    width: ClassVar[int] = 1
    depth: ClassVar[int] = 0

    num_queries: int  # tokens of one square
    shuffle: int = 1
    mlp_dim: int = 0  # width between two linear layers; 0: there is one
    activation: Activation = "exact_gelu"
    has_bias: bool = True
    output_dim: int  # the width of the language model

    def __post_init__(self) -> None:
        _check_values(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """All sizes and settings that a `PictureEncoder` needs, except its weights."""

    clip: ClipConfig
    query: QueryConfig | ConnectorConfig
    channel_order: ChannelOrder = "rgb"  # order that the weights were trained on; input pixels are always RGB

    def __post_init__(self) -> None:
        if self.channel_order not in get_args(ChannelOrder):
            raise ValueError(f"channel_order must be rgb or bgr, got {self.channel_order!r}")

    @property
    def num_activations(self) -> int:
        """About how many numbers are in memory while a block computes one picture, or one square of it.

        They are the MLP's two halves, and queries, keys, values and residuals, of each token.
        """
        return self.clip.num_tokens * (2 * self.clip.hidden_dim + 4 * self.clip.width)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as stored in a bundle's manifest. Switches of the tower that are OpenAI's are left out.

        So digests of models with OpenAI's towers are those of earlier releases.
        """
        return asdict(self) | {"clip": stored_values(self.clip)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "VisionConfig":
        """Inverse of `to_dict`.

        Raises TypeError or KeyError for unknown or missing fields, ValueError for bad values.
        """
        return cls(
            clip=clip_config(values["clip"]),
            query=(ConnectorConfig if "shuffle" in values["query"] else QueryConfig)(**values["query"]),
            channel_order=values["channel_order"],
        )


def stored_values(config: ClipConfig) -> dict[str, Any]:
    """A tower's sizes, and its switches that are not OpenAI's, as plain values. JSON keeps them."""
    values = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in values.items()
        if name == "image_size" or value != default
    }


def clip_config(values: Mapping[str, Any]) -> ClipConfig:
    """Inverse of `stored_values`. Raises TypeError for unknown or missing fields, ValueError for bad values."""
    lists = {name: tuple(value) for name, value in {**values}.items() if isinstance(value, list)}
    return ClipConfig(**{**values, **lists})


def _check_values(config: ClipConfig | QueryConfig | ConnectorConfig) -> None:
    """Raise ValueError for a value of another type than its field's, and for whole numbers that are too small."""
    for name, kind in get_type_hints(type(config)).items():
        value, least = getattr(config, name), 0 if name in _MAY_BE_ZERO else 1
        if kind is int and (type(value) is not int or value < least):
            raise ValueError(f"{name} must be a whole number, at least {least}, got {value!r}")
        if kind is bool and type(value) is not bool:
            raise ValueError(f"{name} must be true or false, got {value!r}")
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        if kind is float or get_origin(kind) is tuple:
            numbers = value if get_origin(kind) is tuple and isinstance(value, tuple) else (value,)
            if len(numbers) != (1 if kind is float else 3) or not all(map(_is_finite, numbers)):
                raise ValueError(f"{name} must be {'a number' if kind is float else 'three numbers'}, got {value!r}")


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


VIT_L_14 = ClipConfig(patch_size=14, width=1024, num_layers=24, num_heads=16, output_dim=768)  # used by the adapters
