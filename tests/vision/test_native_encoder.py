"""The kernels' picture encoder gives the same as torch's modules, and each picture as if it were alone."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from llama_adapter.app.models.memory_fit import place_encoder
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.kernels.arrays import Blocks
from llama_adapter.runtime.kernels.library import KINDS, find_library
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.balancing import read_norms
from llama_adapter.runtime.schemes.layers import dequantise_linears
from llama_adapter.runtime.schemes.state import convert_precision
from llama_adapter.vision.backends.kernels import KernelEncoder
from llama_adapter.vision.backends.torch import TorchVisionBackend
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.pixels import zero_picture
from tests.bounds import Float64, difference, rounding_module, spread
from tests.fakes.towers import CONNECTORS, TOWERS

pytestmark = pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels")

CONFIG = VisionConfig(
    clip=ClipConfig(image_size=56, patch_size=14, width=64, num_layers=2, num_heads=2, output_dim=64),
    query=QueryConfig(num_queries=3, width=96, depth=2, num_heads=2, mlp_dim=160, output_dim=32),
)
CONFIGS = {
    "heads of 32 and 48": CONFIG,
    "heads of 64, more than a block of tokens": dataclasses.replace(
        CONFIG,
        clip=dataclasses.replace(CONFIG.clip, image_size=126, width=128),
        query=dataclasses.replace(CONFIG.query, width=128),
    ),
    "heads of 80": dataclasses.replace(CONFIG, clip=dataclasses.replace(CONFIG.clip, width=160)),
    **TOWERS,
    "heads of 8": dataclasses.replace(CONFIG, query=dataclasses.replace(CONFIG.query, num_heads=12)),
}


@dataclasses.dataclass(frozen=True)
class Ours:
    """The kernels' encoder, which takes and gives tensors."""

    encoder: KernelEncoder
    dtype: torch.dtype

    def __call__(self, pixels_BHWC: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.encoder.encode(pixels_BHWC.numpy())).to(self.dtype)


def random_encoder(config: VisionConfig, dtype: torch.dtype) -> PictureEncoder:
    torch.manual_seed(0)
    encoder = PictureEncoder(config).eval().requires_grad_(False)
    for module in encoder.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.uniform_(0.5, 1.5)
            module.bias.uniform_(-0.5, 0.5)
    return encoder.to(dtype)


def placed(config: VisionConfig, state: dict[str, torch.Tensor], *, dtype: torch.dtype = torch.float32) -> Ours:
    """An encoder by the kernels."""
    made = place_encoder(config, dict(state), num_rows=2, operators="auto", backend=CpuBackend())
    assert isinstance(made, KernelEncoder)
    return Ours(made, dtype)


def encoders(config: VisionConfig, dtype: torch.dtype) -> tuple[Ours, PictureEncoder]:
    """An encoder by the kernels, and one by torch."""
    encoder = random_encoder(config, dtype)
    return placed(config, encoder.state_dict(), dtype=dtype), encoder


def tower_blocks(ours: Ours) -> Blocks:
    return ours.encoder._tower._blocks


def pixels(config: VisionConfig, count: int) -> torch.Tensor:
    side = config.clip.image_size
    return torch.from_numpy(np.random.default_rng(3).integers(0, 256, (count, side, side, 3), dtype=np.uint8))


@pytest.mark.proves("towers: CLIP B to bigG, SigLIP, DINOv2", "CPU")
@pytest.mark.parametrize("config", [*CONFIGS.values(), *CONNECTORS.values()], ids=[*CONFIGS, *CONNECTORS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_the_visual_query_is_that_of_torchs_modules(config: VisionConfig, dtype: torch.dtype) -> None:
    ours, plain = encoders(config, dtype)
    pictures = pixels(config, 3)
    with Float64():
        exact = random_encoder(config, dtype).double()(pictures)
    state = random_encoder(config, dtype).state_dict()
    by_torch = place_encoder(config, state, num_rows=2, operators="aten", backend=CpuBackend())
    assert isinstance(by_torch, TorchVisionBackend)

    found, limit = ours(pictures), spread(plain(pictures), exact)
    assert difference(found, plain(pictures)) <= limit
    assert difference(ours(pictures.float()), plain(pictures)) <= limit
    assert difference(by_torch.encode(pictures.numpy()), plain(pictures)) <= limit
    assert torch.equal(ours(pictures[1:2])[0], found[1])
    # In bfloat16 `plain` rounds pixels too, which the kernels do not.
    assert difference(found, exact) <= spread(rounding_module(plain, dtype)(pictures), exact)


def few_bits(
    config: VisionConfig, precision: Precision, plain_state: dict[str, torch.Tensor] | None = None
) -> tuple[Ours, PictureEncoder]:
    """An encoder with few-bit weights by the kernels, and one by torch with the same weights widened."""
    torch.manual_seed(0)
    plain_state = plain_state or PictureEncoder(config).state_dict()
    state = convert_precision(plain_state, PictureEncoder(config), dtype=torch.float32, wanted=precision)
    widened = encoder_from_state(config, state)
    dequantise_linears(widened)
    return placed(config, state), widened


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.inference_mode()
def test_in_8_bits_activations_are_rounded_and_attention_adds_no_error(config: VisionConfig) -> None:
    ours, plain = few_bits(config, "int8")
    pictures = pixels(config, 2)
    expected = plain(pictures)

    error = (ours(pictures) - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.015


@pytest.mark.parametrize("precision", ["int8", "int4"])
@torch.inference_mode()
def test_patches_in_bfloat16_add_no_error(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    config = CONFIGS["heads of 64, more than a block of tokens"]
    noise = pixels(config, 1)
    rule = config.clip.pixels
    zeros = torch.from_numpy(zero_picture(rule, channel_order=config.channel_order).copy())[None]
    pictures = (noise, torch.full_like(noise, 118), zeros)
    library = find_library().library
    assert library
    kinds, errors = (library.multiplies_bfloat16, False), np.zeros((2, len(pictures)))
    for seed in range(4):  # the error of one model is a matter of chance
        torch.manual_seed(seed)
        state = PictureEncoder(config).state_dict()
        for index, is_narrow in enumerate(kinds):
            monkeypatch.setattr(library, "multiplies_bfloat16", is_narrow)
            ours, plain = few_bits(config, precision, dict(state))
            errors[index] += [float((ours(one) - plain(one)).norm() / plain(one).norm()) for one in pictures]
            assert ours.encoder._tower._patches._kind == KINDS["bfloat16" if is_narrow else "float32"]
    assert (errors[0] <= 1.15 * errors[1]).all()


@pytest.mark.parametrize(("precision", "tolerance"), [("int8", 0.012), ("int4", 0.08)])
@torch.inference_mode()
def test_outliers_behind_norms_cost_no_accuracy(precision: Precision, tolerance: float) -> None:
    config = CONFIGS["heads of 64, more than a block of tokens"]
    torch.manual_seed(0)
    encoder = PictureEncoder(config).eval()
    state, pictures = encoder.state_dict(), pixels(config, 2)
    expected = encoder(pictures)
    for norm, reader in read_norms(encoder).items():  # the changes keep the same function
        for name, factor in ((f"{norm}.weight", 100.0), (f"{norm}.bias", 100.0), (f"{reader}.weight", 0.01)):
            state[name][..., 5:64:50] *= factor

    ours, _ = few_bits(config, precision, state)

    assert (ours(pictures) - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("precision", ["float", "int8"])
@torch.inference_mode()
def test_a_picture_has_the_same_bits_alone_among_others_and_with_any_number_of_threads(precision: Precision) -> None:
    ours, _ = encoders(CONFIG, torch.float32) if precision == "float" else few_bits(CONFIG, precision)
    pictures = pixels(CONFIG, 7)
    together = ours(pictures)

    for index in range(7):
        assert torch.equal(ours(pictures[index : index + 1])[0], together[index])
    num_threads = torch.get_num_threads()
    try:
        for count in (2, 3, 11):
            torch.set_num_threads(count)
            assert torch.equal(ours(pictures), together)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("precision", ["float", "int8", "int4"])
@torch.inference_mode()
def test_kept_tokens_are_those_of_the_whole_block(precision: Precision) -> None:
    ours, plain = encoders(CONFIG, torch.float32) if precision == "float" else few_bits(CONFIG, precision)
    x_BTW = torch.randn(3, 17, 64, generator=torch.Generator().manual_seed(0))
    blocks, block = tower_blocks(ours), plain.clip.blocks[0]

    for num_kept in (1, 6, 7, 17, 30):
        assert np.array_equal(blocks(x_BTW.numpy(), num_kept), blocks(x_BTW.numpy())[:, :num_kept]), num_kept
        torch.testing.assert_close(block(x_BTW, num_kept), block(x_BTW)[:, :num_kept])


@pytest.mark.parametrize("shape", [(0, 17, 64), (2, 0, 64)], ids=["no pictures", "no tokens"])
@torch.inference_mode()
def test_blocks_of_nothing_give_nothing(shape: tuple[int, ...]) -> None:
    ours, _ = encoders(CONFIG, torch.float32)

    assert tower_blocks(ours)(np.zeros(shape, np.float32)).shape == shape


@pytest.mark.parametrize(
    ("half", "size"),
    [("query", {"mlp_dim": 162}), ("clip", {"mlp_dim": 162}), ("clip", {"patch_size": 7})],  # no multiples of 4
    ids=["query", "clip", "patches"],
)
def test_an_encoder_with_a_layer_that_is_not_the_kernels_is_computed_by_torch(half: str, size: dict[str, int]) -> None:
    config = dataclasses.replace(CONFIG, **{half: dataclasses.replace(getattr(CONFIG, half), **size)})
    encoder, library = random_encoder(config, torch.float32), find_library().library
    assert library is not None
    pictures = pixels(config, 2)
    made = place_encoder(config, encoder.state_dict(), num_rows=2, operators="auto", backend=CpuBackend())

    assert isinstance(made, TorchVisionBackend)
    torch.testing.assert_close(made.encode(pictures.numpy()), encoder(pictures), rtol=1e-4, atol=1e-4)
    arrays = {name: tensor.numpy() for name, tensor in encoder.state_dict().items()}
    with pytest.raises(ValueError, match="has a weight"):  # bundles then fall back to torch
        KernelEncoder(config, arrays, dtype="float32", library=library)
