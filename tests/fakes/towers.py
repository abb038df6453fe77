"""Small towers with the switches of every family, and head sizes of real ones; connectors behind such towers."""

from dataclasses import replace

from llama_adapter.vision.config import ClipConfig, ConnectorConfig, QueryConfig, VisionConfig

QUERY = QueryConfig(num_queries=3, width=96, depth=2, num_heads=2, mlp_dim=160, output_dim=32)
SIGLIP = ClipConfig(
    image_size=60,  # 4 pixels are cut
    patch_size=14,
    width=144,
    num_layers=2,
    num_heads=2,
    output_dim=144,
    mlp_dim=268,
    activation="gelu_tanh",
    norm_eps=1e-6,
    num_class_tokens=0,
    has_patch_bias=True,
    has_pre_norm=False,
    has_projection=False,
    is_squashed=True,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
REGISTERS = ClipConfig(
    image_size=56,
    patch_size=14,
    width=208,
    num_layers=2,
    num_heads=2,
    output_dim=208,
    activation="exact_gelu",
    num_class_tokens=5,
    has_patch_bias=True,
    has_post_norm=False,
    has_projection=False,
    drops_class=True,
)
TOWERS = {
    "SigLIP, heads of 72": VisionConfig(clip=SIGLIP, query=QUERY),
    "registers, heads of 104, tokens of a layer": VisionConfig(clip=REGISTERS, query=QUERY, channel_order="bgr"),
}
PATCHES = ClipConfig(image_size=56, patch_size=14, width=64, num_layers=2, num_heads=2, output_dim=64, drops_class=True)
TWO_LINEARS = ConnectorConfig(num_queries=16, mlp_dim=96, output_dim=32)
CONNECTORS = {
    "LLaVA": VisionConfig(clip=PATCHES, query=TWO_LINEARS),
    "tanh": VisionConfig(clip=SIGLIP, query=replace(TWO_LINEARS, activation="gelu_tanh", has_bias=False)),
    "quick": VisionConfig(clip=SIGLIP, query=replace(TWO_LINEARS, activation="quick_gelu")),
    "SmolVLM": VisionConfig(
        clip=SIGLIP, query=ConnectorConfig(num_queries=4, shuffle=2, output_dim=32, has_bias=False)
    ),
}
