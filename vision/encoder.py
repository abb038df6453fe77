"""Pixels to visual query as one module: what runs in torch is what is exported."""

# B pictures, H x W x C pixels, Q queries, D width of the language model

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from llama_adapter.runtime.schemes.layers import load_state
from llama_adapter.vision.block import AttentionFunction, SelfAttention
from llama_adapter.vision.clip import ClipVisionTower
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.query import VisualQueryBlocks

# CLIP's own statistics, for pixels in 0..1, in R, G, B order.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


class PictureEncoder(nn.Module):
    """Normalisation, CLIP tower and visual-query blocks."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.clip = ClipVisionTower(config.clip)
        self.query = VisualQueryBlocks(config.query, input_dim=config.clip.output_dim)
        with torch.device("cpu"):  # real values also where the weights are only sketched on the meta device
            self.register_buffer("mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
            self.register_buffer("std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, and so of the output."""
        return self.clip.class_embedding.dtype

    def normalise(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels 0..255, any real type, (B, S, S, 3) RGB -> normalised float32 (B, 3, S, S)."""
        if self.config.channel_order == "bgr":
            # Released adapters saw OpenCV's order in training: blue stands where CLIP expects red.
            pixels_BHWC = pixels_BHWC.flip(-1)
        pixels_BCHW = pixels_BHWC.permute(0, 3, 1, 2).float()
        return (pixels_BCHW / 255.0 - self.mean.float()) / self.std.float()

    def features(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels as in `forward` -> CLIP features (B, 1 + patches, output_dim) of all tokens."""
        features: Tensor = self.clip(self.normalise(pixels_BHWC).to(self.dtype))
        return features

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels uint8 or float in 0..255, (B, S, S, 3) RGB -> visual query (B, Q, D) in the type of the weights."""
        visual_query_BQD: Tensor = self.query(self.features(pixels_BHWC))
        return visual_query_BQD


def encoder_from_state(config: VisionConfig, state: Mapping[str, Tensor]) -> PictureEncoder:
    """Encoder for inference around the tensors of `state`, which are shared, not copied.

    Quantised layers compute only after a backend has prepared them. Raises RuntimeError if names or shapes differ from
    those of `config`.
    """
    with torch.device("meta"):
        encoder = PictureEncoder(config)
    load_state(encoder, state)
    return encoder


def use_attention(encoder: PictureEncoder, attend: AttentionFunction) -> None:
    """Let every block of `encoder` compute its attention by `attend`."""
    for module in encoder.modules():
        if isinstance(module, SelfAttention):
            module.attend = attend
