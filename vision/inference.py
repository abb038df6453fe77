"""The fastest forms of the encoder: the same function in fewer passes over the memory. Not for training or export."""

# B pictures, H x W x C pixels, T patches, F numbers of a patch (rows, columns, colours), W width, N heads, H head size

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from llama_adapter.runtime.operators import Linear
from llama_adapter.runtime.schemes.layers import replace_layers
from llama_adapter.vision.block import (
    QUICK_GELU_FACTOR,
    AttentionFunction,
    Mlp,
    SelfAttention,
    fused_attention,
    quick_gelu,
)
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.pixels import folded, patches_of


class FoldedPatches(nn.Module):
    """Normalisation and patch embedding as one linear layer, in float32 for any dtype of the encoder."""

    def __init__(self, encoder: PictureEncoder) -> None:
        super().__init__()
        own, config = encoder.clip.patch_embedding, encoder.config
        given = [None if part is None else part.detach().float().cpu().numpy() for part in (own.weight, own.bias)]
        assert given[0] is not None
        weight_WF, bias_W = map(
            torch.from_numpy, folded(given[0], given[1], rule=config.clip, channel_order=config.channel_order)
        )
        self.patch_size, self.dtype = config.clip.patch_size, encoder.dtype
        self.linear = Linear(weight_WF.shape[1], len(weight_WF), device="meta")
        self.linear.weight = nn.Parameter(weight_WF, requires_grad=False)
        self.linear.bias = nn.Parameter(bias_W, requires_grad=False)

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels uint8 or float32 (B, S, S, 3) RGB -> embedded patches (B, T, W), row by row, in the encoder's type."""
        # Cut while they are bytes, which is a quarter of the memory traffic.
        patches_BTW: Tensor = self.linear(patches_of(pixels_BHWC, patch=self.patch_size).float())
        return patches_BTW.to(self.dtype)


class HostEncoder(nn.Module):
    """A `PictureEncoder` for inference on the host. The result differs only by rounding.

    It shares the tensors of `encoder`, but not its modules, so `encoder` is not changed.
    """

    def __init__(self, encoder: PictureEncoder) -> None:
        super().__init__()
        self.patches = FoldedPatches(encoder)
        self.clip, self.query = _modules_copied(encoder.clip), _modules_copied(encoder.query)
        attend = attention_for(encoder.dtype)
        for module in self.modules():
            if isinstance(module, Mlp) and module.activation is quick_gelu:
                module.activation = quick_gelu_
            elif isinstance(module, SelfAttention):
                module.attend = attend

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """Pixels uint8 or float32 (B, S, S, 3) RGB -> visual query (B, Q, D) in the type of the weights."""
        visual_query_BQD: Tensor = self.query(self.clip.tower(self.patches(pixels_BHWC)))
        return visual_query_BQD


class ScaledMlp(nn.Module):
    """An `Mlp` with quick GELU, x * sigmoid(1.702 x), as silu(1.702 x) / 1.702: one pass over the activations.

    The factors are part of the matrix products, which apply them to their sums before rounding.
    """

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down
        self.scaled_bias = nn.Parameter(mlp.up.bias.detach() * QUICK_GELU_FACTOR, requires_grad=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """(B, T, W) -> the same shape."""
        rows_RW = x_BTW.flatten(0, 1)
        hidden = torch.addmm(self.scaled_bias, rows_RW, self.up.weight.T, alpha=QUICK_GELU_FACTOR)
        torch.nn.functional.silu(hidden, inplace=True)
        out_RW = torch.addmm(self.down.bias, hidden, self.down.weight.T, alpha=1 / QUICK_GELU_FACTOR)
        return out_RW.view_as(x_BTW)


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


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _modules_copied(module: ModuleT) -> ModuleT:
    """A copy of the modules that shares their tensors, so that it can be changed without changing `module`."""
    own = copy.copy(module)
    own._parameters, own._buffers = module._parameters.copy(), module._buffers.copy()
    own._modules = {name: child and _modules_copied(child) for name, child in module._modules.items()}
    return own


def quick_gelu_(x: Tensor) -> Tensor:
    """CLIP's activation, x * sigmoid(1.702 x), in place, because memory that was just written is in the caches."""
    return torch.nn.functional.silu(x.mul_(QUICK_GELU_FACTOR), inplace=True).mul_(1 / QUICK_GELU_FACTOR)


def attention_for(dtype: torch.dtype) -> AttentionFunction:
    """The fastest attention on this host. In float16, plain products take six times as long as fused attention."""
    has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return bfloat16_attention if dtype == torch.bfloat16 and has_instructions() else fused_attention


def bfloat16_attention(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor) -> Tensor:
    """Softmax attention as two plain products, for processors with bfloat16 instructions.

    torch's fused attention on the host computes the products in float32. Here scores are rounded to bfloat16, like all
    values between layers.
    """
    q_BNTH = (q_BNTH * q_BNTH.shape[-1] ** -0.5).contiguous()
    scores_BNTT = q_BNTH @ k_BNTH.contiguous().transpose(-1, -2)
    heads_BNTH: Tensor = scores_BNTT.softmax(dim=-1) @ v_BNTH.contiguous()
    return heads_BNTH
