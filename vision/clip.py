"""CLIP's picture tower with every token in the output, where CLIP itself would keep the class token only."""

# B pictures, T tokens (class token first, then patches row by row), W width

from torch import Tensor, nn

from llama_adapter.runtime.operators import random_parameter
from llama_adapter.vision.block import LAYER_NORM_EPS, Block, prepend, quick_gelu
from llama_adapter.vision.config import ClipConfig


class ClipVisionTower(nn.Module):
    """ViT of CLIP (Radford et al., 2021, openai/CLIP `VisionTransformer`)."""

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        width, patch = config.width, config.patch_size
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=False)
        self.class_embedding = random_parameter(width, std=width**-0.5)
        self.position_embedding = random_parameter(config.num_patches + 1, width, std=width**-0.5)
        self.pre_norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.blocks = nn.ModuleList(
            Block(width, num_heads=config.num_heads, hidden_dim=4 * width, activation=quick_gelu)
            for _ in range(config.num_layers)
        )
        self.post_norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.projection = nn.Linear(width, config.output_dim, bias=False)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Normalised pixels (B, 3, S, S) -> features (B, 1 + patches, output_dim)."""
        return self.tower(self.patch_embedding(pixels_BCHW).flatten(2).transpose(1, 2))

    def tower(self, patches_BTW: Tensor) -> Tensor:
        """Embedded patches (B, patches, W), row by row -> features (B, 1 + patches, output_dim)."""
        x_BTW = prepend(self.class_embedding[None, None], patches_BTW) + self.position_embedding
        x_BTW = self.pre_norm(x_BTW)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        features: Tensor = self.projection(self.post_norm(x_BTW))
        return features
