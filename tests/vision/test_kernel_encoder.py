"""The encoder on numpy arrays computes what the module of torch does."""

import dataclasses

import numpy as np
import pytest
import torch

from llama_adapter.app.models.memory_fit import place_encoder
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.vision.backends.kernels import KernelEncoder
from llama_adapter.vision.config import ClipConfig, ConnectorConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.inference import HostEncoder

CLIP = ClipConfig(image_size=32, patch_size=8, width=64, num_layers=2, num_heads=2, output_dim=48)
QUERY = QueryConfig(num_queries=5, width=64, depth=2, num_heads=2, mlp_dim=128, output_dim=96)
TOWERS = {
    "CLIP": CLIP,
    "SigLIP": dataclasses.replace(
        CLIP, activation="gelu_tanh", num_class_tokens=0, has_patch_bias=True, has_pre_norm=False, has_projection=False,
        output_dim=64, image_size=35,
    ),
    "DINOv2": dataclasses.replace(
        CLIP, activation="exact_gelu", num_class_tokens=5, has_patch_bias=True, has_pre_norm=False, drops_class=True,
        has_projection=False, output_dim=64,
    ),
}  # fmt: skip

CONNECTORS = {
    "LLaVA": ConnectorConfig(num_queries=16, mlp_dim=96, output_dim=32),
    "tanh": ConnectorConfig(num_queries=16, mlp_dim=96, output_dim=32, activation="gelu_tanh", has_bias=False),
    "quick": ConnectorConfig(num_queries=16, mlp_dim=96, output_dim=32, activation="quick_gelu"),
    "SmolVLM": ConnectorConfig(num_queries=4, shuffle=2, output_dim=32, has_bias=False),
}
CASES = {
    **{name: VisionConfig(clip=tower, query=QUERY, channel_order="bgr") for name, tower in TOWERS.items()},
    **{name: VisionConfig(clip=TOWERS["SigLIP"], query=query) for name, query in CONNECTORS.items()},
}

pytestmark = pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels")


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.06)], ids=str)
def test_visual_queries_are_those_of_the_module(config: VisionConfig, dtype: torch.dtype, limit: float) -> None:
    torch.manual_seed(0)
    encoder = PictureEncoder(config).eval().requires_grad_(False)
    state = {name: tensor.to(dtype) for name, tensor in encoder.state_dict().items()}
    ours = place_encoder(config, dict(state), num_rows=3, operators="auto", backend=CpuBackend())
    assert isinstance(ours, KernelEncoder)
    side = config.clip.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (3, side, side, 3), np.uint8)

    found = ours.encode(pixels)

    assert np.abs(found - HostEncoder(encoder)(torch.from_numpy(pixels)).numpy()).max() < limit
    assert np.array_equal(found[1], ours.encode(pixels[1:2])[0])
    assert np.allclose(found, ours.encode(pixels.astype(np.float32)), atol=limit)
