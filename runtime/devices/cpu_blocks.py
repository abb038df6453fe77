"""Stacks of transformer blocks that are computed by one call of the C kernels."""

# B pictures, T tokens, W width

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.cpu_linear import NativeLinear
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.kernels.structs import ACTIVATIONS, BlockStruct, StackStruct
from llama_adapter.runtime.kernels.threads import num_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockParts:
    """One pre-norm block: x += out(attention(qkv(norm1(x)))); x += down(activation(up(norm2(x))))."""

    norm1: nn.LayerNorm
    qkv: NativeLinear
    out: NativeLinear
    norm2: nn.LayerNorm
    up: NativeLinear
    down: NativeLinear


class NativeBlocks(nn.Module):
    """Blocks of one width as a single module. See runtime/kernels/encoder.h for the types in which it computes."""

    def __init__(self, blocks: Sequence[BlockParts], *, num_heads: int, activation: str, library: Library) -> None:
        """`activation` is a key of `ACTIVATIONS`."""
        super().__init__()
        self._library = library
        self._kept: list[object] = [*blocks]  # the structures point to these
        structs = (BlockStruct * len(blocks))(*map(self._describe, blocks))
        self._struct = StackStruct(
            width=blocks[0].qkv.in_features,
            num_heads=num_heads,
            hidden_dim=blocks[0].up.out_features,
            num_blocks=len(blocks),
            activation=ACTIVATIONS[activation],
            norm_eps=blocks[0].norm1.eps,
            blocks=structs,
        )
        self._pointer = ctypes.addressof(self._struct)

    def forward(self, x_BTW: Tensor, num_kept: int | None = None) -> Tensor:
        """(B, T, W) in float32 or bfloat16 -> (B, num_kept, W) in the same type; by default, all T tokens are kept.

        `x_BTW` is not changed. Raises RuntimeError for another width or device.
        """
        if x_BTW.ndim != 3 or x_BTW.shape[2] != self._struct.width or not x_BTW.is_cpu:
            raise RuntimeError(
                f"blocks of width {self._struct.width} were given {tuple(x_BTW.shape)} on {x_BTW.device}"
            )
        x_float = x_BTW.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        num_pictures, num_tokens, width = x_BTW.shape
        num_kept = num_tokens if num_kept is None else min(num_kept, num_tokens)
        self._library.blocks(self._pointer, x_float.data_ptr(), num_pictures, num_tokens, num_kept, num_threads())
        kept = x_float.flatten()[: num_pictures * num_kept * width]
        return kept.view(num_pictures, num_kept, width).to(x_BTW.dtype)

    def _describe(self, block: BlockParts) -> BlockStruct:
        return BlockStruct(
            norm1_weight=self._floats(block.norm1.weight),
            norm1_bias=self._floats(block.norm1.bias),
            norm2_weight=self._floats(block.norm2.weight),
            norm2_bias=self._floats(block.norm2.bias),
            qkv=block.qkv.struct,
            out=block.out.struct,
            up=block.up.struct,
            down=block.down.struct,
        )

    def _floats(self, tensor: Tensor) -> int:
        """Address of a float32 copy that lives as long as this module."""
        copy = tensor.detach().float().contiguous()
        self._kept.append(copy)
        return copy.data_ptr()
