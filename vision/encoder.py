"""From pixels to visual query as one module. `onnx_graph.py` and `mindspore_cells.py` write it as graphs."""

# B pictures, H x W x C pixels, P patches row by row, T tokens (class tokens first, then patches), W width, F tokens of
# the features, Q queries, D width of the language model

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from llama_adapter.runtime.operators import Linear, random_parameter
from llama_adapter.runtime.schemes.layers import load_state, replace_layers
from llama_adapter.vision.block import (
    ACTIVATIONS,
    AttentionFunction,
    Block,
    Mlp,
    ScaledMlp,
    SelfAttention,
    plain_attention,
    prepend,
    quick_gelu,
)
from llama_adapter.vision.config import (
    LAYER_NORM_EPS,
    NORM_READERS,
    ClipConfig,
    ConnectorConfig,
    QueryConfig,
    VisionConfig,
)


class ClipVisionTower(nn.Module):
    """The ViT of CLIP (Radford et al., 2021), SigLIP (Zhai et al., 2023) or DINOv2 (Oquab et al., 2023), by its config.

    Its output has all tokens, in contrast to CLIP, which keeps the class token, and SigLIP, which pools the patches.
    Layer scales of DINOv2 are factors in the weights before them.
    """

    norm_readers: ClassVar = {norm: NORM_READERS[norm] for norm in ("post_norm",)}

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.config, width, patch = config, config.width, config.patch_size
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=config.has_patch_bias)
        if config.num_class_tokens:
            # One class token is a vector, as in CLIP's files.
            shape = (width,) if config.num_class_tokens == 1 else (config.num_class_tokens, width)
            self.class_embedding = random_parameter(*shape, std=width**-0.5)
        self.position_embedding = random_parameter(config.num_tokens, width, std=width**-0.5)
        self.pre_norm = nn.LayerNorm(width, eps=config.norm_eps) if config.has_pre_norm else nn.Identity()
        sizes = {"num_heads": config.num_heads, "hidden_dim": config.hidden_dim}
        self.blocks = nn.ModuleList(
            Block(width, **sizes, activation=config.activation, eps=config.norm_eps) for _ in range(config.num_layers)
        )
        self.post_norm = nn.LayerNorm(width, eps=config.norm_eps) if config.has_post_norm else nn.Identity()
        self.projection = Linear(width, config.output_dim, bias=False) if config.has_projection else nn.Identity()

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalised pixels (B, 3, S, S) -> features (B, F, output_dim)."""
        return self.tower(self.patch_embedding(pixels_BCHW).flatten(2).transpose(1, 2))

    def tower(self, patches_BPW: Tensor) -> Tensor:
        """Embedded patches (B, P, W) -> features (B, F, output_dim)."""
        x_BTW, num_class_tokens = patches_BPW, self.config.num_class_tokens
        if num_class_tokens:
            x_BTW = prepend(self.class_embedding.expand(1, num_class_tokens, -1), x_BTW)
        x_BTW = self.pre_norm(x_BTW + self.position_embedding)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        x_BFW = x_BTW[:, num_class_tokens:] if self.config.drops_class else x_BTW
        features: Tensor = self.projection(self.post_norm(x_BFW))
        return features


class VisualQueryBlocks(nn.Module):
    """Learned queries, which reduce a picture's features to the few tokens that LLaMA reads.

    A projection, transformer blocks over [queries ; features], a projection (LLaMA-Adapter V2, Gao et al., 2023).
    """

    def __init__(self, config: QueryConfig, *, input_dim: int) -> None:
        super().__init__()
        self.num_queries = config.num_queries
        self.input_projection = Linear(input_dim, config.width)
        self.input_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.queries = random_parameter(config.num_queries, config.width, std=1.0)
        self.blocks = nn.ModuleList(
            Block(config.width, num_heads=config.num_heads, hidden_dim=config.mlp_dim, activation="exact_gelu")
            for _ in range(config.depth)
        )
        self.output_projection = Linear(config.width, config.output_dim)
        self.output_norm = nn.LayerNorm(config.output_dim, eps=LAYER_NORM_EPS)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Features (B, T, C) -> visual query (B, Q, D)."""
        x_BTW = self.input_norm(self.input_projection(features_BTC))
        x_BTW = prepend(self.queries[None], x_BTW)
        for block in self.blocks[:-1]:
            x_BTW = block(x_BTW)
        # The other tokens of the last block are not read, so they are not computed.
        x_BQW = self.blocks[-1](x_BTW, self.num_queries) if self.blocks else x_BTW[:, : self.num_queries]
        visual_query_BQD: Tensor = self.output_norm(self.output_projection(x_BQW))
        return visual_query_BQD


class Connector(nn.Module):
    """Turns the features of patches into tokens in the language model's width."""

    def __init__(self, config: ConnectorConfig, *, input_dim: int) -> None:
        super().__init__()
        self.shuffle, joined_dim = config.shuffle, input_dim * config.shuffle**2
        self.blocks = nn.ModuleList()  # it has none
        self.up = Linear(joined_dim, config.mlp_dim, bias=config.has_bias) if config.mlp_dim else nn.Identity()
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.activation]
        self.down = Linear(config.mlp_dim or joined_dim, config.output_dim, bias=config.has_bias)

    def forward(self, features_BPC: Tensor) -> Tensor:
        """Features (B, P, C) -> tokens (B, P / shuffle^2, D), row by row."""
        if self.shuffle > 1:
            (num_pictures, num_patches, width), each = features_BPC.shape, self.shuffle
            side = math.isqrt(num_patches) // each
            rows = features_BPC.reshape(num_pictures, side, each, side, each, width).transpose(2, 3)
            features_BPC = rows.reshape(num_pictures, side * side, each * each * width)
        hidden_BQC = features_BPC if isinstance(self.up, nn.Identity) else self.activation(self.up(features_BPC))
        tokens_BQD: Tensor = self.down(hidden_BQC)
        return tokens_BQD


class PictureEncoder(nn.Module):
    """Normalisation, a tower, and visual-query blocks or a connector."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.clip = ClipVisionTower(config.clip)
        self.query: VisualQueryBlocks | Connector
        if isinstance(config.query, ConnectorConfig):
            self.query = Connector(config.query, input_dim=config.clip.output_dim)
        else:
            self.query = VisualQueryBlocks(config.query, input_dim=config.clip.output_dim)
        with torch.device("cpu"):  # real values even if the weights are on the meta device
            for name, values in (("mean", config.clip.mean), ("std", config.clip.std)):
                self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(3, 1, 1), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the output."""
        return self.clip.position_embedding.dtype

    def normalise(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels 0..255, any real type, (B, S, S, 3) RGB -> normalised float32 (B, 3, S, S)."""
        if self.config.channel_order == "bgr":
            # Released adapters were trained with OpenCV's channel order, in which blue is where CLIP expects red.
            pixels_BHWC = pixels_BHWC.flip(-1)
        pixels_BCHW = pixels_BHWC.permute(0, 3, 1, 2).float()
        return (pixels_BCHW / 255.0 - self.mean.float()) / self.std.float()

    def features(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels as in `forward` -> the tower's features (B, F, output_dim)."""
        features: Tensor = self.clip(self.normalise(pixels_BHWC).to(self.dtype))
        return features

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels uint8 or float in 0..255, (B, S, S, 3) RGB -> visual query (B, Q, D) in the type of the weights."""
        visual_query_BQD: Tensor = self.query(self.features(pixels_BHWC))
        return visual_query_BQD


def encoder_from_state(config: VisionConfig, state: Mapping[str, Tensor]) -> PictureEncoder:
    """An encoder for inference with the tensors of `state`, which are shared, not copied.

    Quantised layers can compute only after a backend has prepared them. Raises RuntimeError if names or shapes differ
    from those of `config`.
    """
    with torch.device("meta"):
        encoder = PictureEncoder(config)
    load_state(encoder, state)
    return encoder


def use_training_forms(encoder: nn.Module) -> None:
    """Set the forms of an encoder's blocks, or of a part of it, whose backward pass is faster on a CPU.

    Attention is two matrix products. Quick GELU is silu(1.702 x) / 1.702. Its factors are multiplied with the weights,
    which are smaller than the activations.
    """
    use_attention(encoder, plain_attention)
    for module in encoder.modules():
        if isinstance(module, Mlp):
            module.is_scaled = module.activation is quick_gelu


def use_attention(encoder: nn.Module, attend: AttentionFunction) -> None:
    """Set the attention function of every block of an encoder, or of a part of it."""
    for module in encoder.modules():
        if isinstance(module, SelfAttention):
            module.attend = attend


def scale_activations(encoder: nn.Module) -> None:
    """Use `ScaledMlp` in place of every `Mlp` that it can compute: with quick GELU and weights in floats.

    Call it after the device's backend has prepared the encoder.
    """

    def scaled(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, Mlp) or module.activation is not quick_gelu:
            return None
        layers: tuple[nn.Module, ...] = (module.up, module.down)
        is_float = all(isinstance(layer, nn.Linear) and layer.weight.is_floating_point() for layer in layers)
        return ScaledMlp(module) if is_float else None

    replace_layers(encoder, scaled)
