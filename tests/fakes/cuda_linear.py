"""torch's CUDA operators for weights of 8 and 4 bits, simulated on the CPU with the same checks of arguments.

Written from aten/src/ATen/native/cuda/int8mm.cu, int4mm.cu and Blas.cpp. Weights of 4 bits have the layout of the
tensor cores' m16n8k16: an int32 holds eight inputs of one output, from two tiles.
"""

# M rows, N outputs, K inputs; t lane of a warp

from collections import Counter

import pytest
import torch
from torch import Tensor


class LinearOps:
    """Counts calls by operator; `install` puts the fakes in place of torch's operators."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._widened: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the packed weight; unpacking is slow

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("_weight_int8pack_mm", "_convert_weight_to_int4pack", "_weight_int4pack_mm", "_int_mm"):
            patch.setattr(torch, name, getattr(self, name))
        patch.setattr("llama_adapter.runtime.devices.cuda_linear._has_kernel", lambda name: hasattr(self, name))

    def _weight_int8pack_mm(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        self.calls["_weight_int8pack_mm"] += 1
        assert (x.dim(), weight.dim(), scale.dim()) == (2, 2, 1)
        assert x.shape[1] == weight.shape[1]
        assert len(weight) == len(scale)
        assert weight.dtype == torch.int8
        assert x.is_contiguous(), "the kernel reads it by address"
        return (x.float() @ weight.float().T * scale.float()).to(x.dtype)

    def _convert_weight_to_int4pack(self, weight: Tensor, inner_tiles: int) -> Tensor:
        assert weight.dim() == 2
        assert weight.dtype == torch.uint8
        assert weight.is_contiguous()
        assert inner_tiles in (2, 4, 8)
        num_outputs, num_inputs = len(weight), weight.shape[1] * 2
        assert num_inputs % (16 * inner_tiles) == 0
        codes = torch.stack([weight >> 4, weight & 15], dim=-1).flatten(1).long()  # the high half is the even input
        # (N / 8, 8, K / (16 I), I / 2, tile, half of the tile, t % 4, of a byte)
        parts = codes.view(num_outputs // 8, 8, num_inputs // (16 * inner_tiles), inner_tiles // 2, 2, 2, 4, 2)
        parts = parts.permute(0, 2, 1, 6, 3, 7, 4, 5)
        shifts = torch.arange(0, 32, 4).view(2, 2, 2)
        words = (parts << shifts).sum((-1, -2, -3))  # (N / 8, K / (16 I), 8, 4, I / 2)
        return words.flatten(2, 3).to(torch.int32)

    def _weight_int4pack_mm(self, x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
        self.calls["_weight_int4pack_mm"] += 1
        assert x.dtype == torch.bfloat16
        assert x.dim() == 2
        assert x.is_contiguous()
        assert packed.dtype == torch.int32
        assert packed.dim() == 4
        assert packed.is_contiguous()
        inner_tiles, num_inputs, num_outputs = packed.shape[3] * 2, x.shape[1], len(packed) * 8
        assert inner_tiles in (2, 4, 8)
        assert packed.shape[1] == num_inputs // (16 * inner_tiles)
        assert packed.shape[2] == 32
        assert group in (32, 64, 128, 256)
        assert num_inputs % group == 0
        assert scales_and_zeros.shape == (num_inputs // group, num_outputs, 2)
        assert scales_and_zeros.dtype == torch.bfloat16, "read as such, unchecked"
        if id(packed) not in self._widened:
            scale, zero = scales_and_zeros.float().repeat_interleave(group, 0).unbind(-1)
            weight = (codes_of(packed).float() - 8) * scale.T + zero.T
            self._widened[id(packed)] = packed, weight.bfloat16().float()  # in bfloat16, as the tensor cores receive it
        return (x.float() @ self._widened[id(packed)][1].T).bfloat16()

    def _int_mm(self, first: Tensor, second: Tensor) -> Tensor:
        self.calls["_int_mm"] += 1
        assert first.dtype == second.dtype == torch.int8
        assert len(first) > 16
        assert first.shape[1] % 8 == 0
        assert second.shape[1] % 8 == 0
        return first.int() @ second.int()


def codes_of(packed: Tensor) -> Tensor:
    """Packed weights -> codes 0..15 (N, K)."""
    words = packed.long().unflatten(2, (8, 4))[..., None, None, None]
    parts = (words >> torch.arange(0, 32, 4).view(2, 2, 2)) & 15  # as in the packing, in its permuted order
    codes = parts.permute(0, 2, 1, 4, 6, 7, 3, 5)
    return codes.reshape(len(packed) * 8, -1)
