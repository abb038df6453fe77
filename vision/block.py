"""The pre-norm transformer block that CLIP's tower and the visual-query blocks share."""

# B pictures, T tokens, R rows of all pictures, W width, N heads, H head size

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.runtime.operators import Linear
from llama_adapter.vision.config import LAYER_NORM_EPS, NORM_READERS, Activation

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


fused_attention: AttentionFunction = F.scaled_dot_product_attention  # softmax attention; faster for inference


def plain_attention(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor) -> Tensor:
    """Softmax attention as two matrix products. Its backward pass is faster on a CPU than that of fused attention."""
    scores_BNTT = (q_BNTH * q_BNTH.shape[-1] ** -0.5) @ k_BNTH.transpose(-1, -2)
    heads_BNTH: Tensor = scores_BNTT.softmax(dim=-1) @ v_BNTH
    return heads_BNTH


QUICK_GELU_FACTOR: Final = 1.702


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's activation, x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(QUICK_GELU_FACTOR * x)


ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "exact_gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def prepend(tokens_1SW: Tensor, x_BTW: Tensor) -> Tensor:
    """[tokens ; x] for every picture, (B, S + T, W)."""
    return torch.cat([tokens_1SW.expand(len(x_BTW), -1, -1), x_BTW], dim=1)


class SelfAttention(nn.Module):
    """Multi-head attention without a mask. The packed projection has the order q, k, v."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.attend: AttentionFunction = fused_attention

    def forward(self, x_BTW: Tensor, num_kept: int | None = None) -> Tensor:
        """(B, T, W) -> the same shape.

        With `num_kept`, only the first tokens are computed; they attend to all tokens.
        """
        q_BNTH, k_BNTH, v_BNTH = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x_BTW).split([x_BTW.shape[2]] * 3, dim=2)
        )
        heads_BNTH = self.attend(q_BNTH if num_kept is None else q_BNTH[:, :, :num_kept], k_BNTH, v_BNTH)
        out: Tensor = self.out(heads_BNTH.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self, width: int, hidden_dim: int, *, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = Linear(width, hidden_dim)
        self.down = Linear(hidden_dim, width)
        self.activation = activation
        self.is_scaled = False  # see `use_training_forms`

    def forward(self, x: Tensor) -> Tensor:
        if self.is_scaled:
            factor = QUICK_GELU_FACTOR
            hidden = F.silu(F.linear(x, self.up.weight * factor, self.up.bias * factor))
            return F.linear(hidden, self.down.weight / factor, self.down.bias)
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class ScaledMlp(nn.Module):
    """An `Mlp` with quick GELU, x * sigmoid(1.702 x), as silu(1.702 x) / 1.702: one pass over the activations.

    The factors are part of the matrix products, which apply them to their sums before rounding. For inference only.
    """

    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down
        self.scaled_bias = nn.Parameter(mlp.up.bias.detach() * QUICK_GELU_FACTOR, requires_grad=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """(B, T, W) -> the same shape."""
        rows_RW = x_BTW.flatten(0, 1)
        hidden = torch.addmm(self.scaled_bias, rows_RW, self.up.weight.T, alpha=QUICK_GELU_FACTOR)
        F.silu(hidden, inplace=True)
        out_RW = torch.addmm(self.down.bias, hidden, self.down.weight.T, alpha=1 / QUICK_GELU_FACTOR)
        return out_RW.view_as(x_BTW)


class Block(nn.Module):
    """x += Attention(LN(x)); x += MLP(LN(x))."""

    norm_readers: ClassVar = {norm: NORM_READERS[norm] for norm in ("norm1", "norm2")}

    def __init__(
        self, width: int, *, num_heads: int, hidden_dim: int, activation: Activation, eps: float = LAYER_NORM_EPS
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = SelfAttention(width, num_heads=num_heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = Mlp(width, hidden_dim, activation=ACTIVATIONS[activation])

    def forward(self, x_BTW: Tensor, num_kept: int | None = None) -> Tensor:
        """(B, T, W) -> the same shape. With `num_kept`, only the first tokens are computed."""
        kept_BTW = x_BTW if num_kept is None else x_BTW[:, :num_kept]
        x_BTW = kept_BTW + self.attention(self.norm1(x_BTW), num_kept)
        out: Tensor = x_BTW + self.mlp(self.norm2(x_BTW))
        return out
