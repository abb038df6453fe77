"""Weights in files in the packed layout of the kernels of an instruction set: names, forms, and unpacking.

The packed form of `head.weight` has a name such as `head.weight_packed_int8`. Its bytes are used directly from the
mapped file. Unpacking is exact. The layout is that of `pack_block` in runtime/kernels/linear.h.
"""

# O outputs, I inputs, B blocks of outputs, L outputs of a block, G groups of inputs, D adjacent inputs

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from llama_adapter.runtime.kernels.layout import PACKED as PACKED
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.memory import ALIGNMENT
from llama_adapter.runtime.schemes import FLOAT, QUANTISED, Precision, int4, int8
from llama_adapter.runtime.schemes.scheme import Scheme, TensorForm, dtype_name, find_scheme

# Stored dtypes of weights, by kind. A packed name ends with its kind.
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}
_SIDE_BY_SIDE: Final = {"float32": 1, "bfloat16": 2, "int8": 4, "int4": int4.GROUP}
# Stored tensors that are not inside the packed ones, by the suffix of their names.
_BESIDE: Final[Mapping[str, tuple[str, ...]]] = {"int8": (int8.SCALE,)}


def kind_of(precision: Precision, dtype: torch.dtype) -> str | None:
    """The kind of packed weights for `precision`, or for `dtype` if that is float; None for a type without kernels."""
    kind = dtype_name(dtype) if precision == FLOAT else str(precision)
    return kind if kind in DTYPES else None


def find_packed(state: Mapping[str, Tensor], name: str) -> str | None:
    """The kind of the packed weight `name` in `state`; None if it is not packed, or one of its tensors is missing."""
    kind = next((kind for kind in DTYPES if f"{name}{PACKED}{kind}" in state), None)
    is_whole = kind is not None and all(name + suffix in state for suffix in beside(kind))
    return kind if is_whole else None


def beside(kind: str) -> tuple[str, ...]:
    """Suffixes of the stored tensors of a kind that are not part of the packed tensor."""
    return _BESIDE.get(kind, ())


def packed_form(shape: tuple[int, ...], kind: str, layout: PackedLayout) -> TensorForm | None:
    """The form of the packed weight of a linear layer (out, in).

    None if the kernels do not support its number of inputs.
    """
    num_out, num_in = shape
    if num_in % max(_SIDE_BY_SIDE[kind], 4):
        return None
    num_blocks = -(-num_out // layout.block)
    if kind == "int4":
        num_bytes = num_in // int4.GROUP * layout.block * (2 + int4.GROUP // 2)
    else:
        num_bytes = num_in * layout.block * DTYPES[kind].itemsize
    return TensorForm((-(-num_blocks * num_bytes // ALIGNMENT) * ALIGNMENT,), torch.uint8)


def packed_forms(
    forms: Mapping[str, TensorForm], shapes: Mapping[str, tuple[int, ...]], *, layout: PackedLayout
) -> dict[str, TensorForm]:
    """The forms of a state dict after its linear weights are packed, except those that kernels do not support.

    `forms` are those of the plain state dict, `shapes` the shapes (out, in) of its linear weights.
    """
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    replaced: dict[str, tuple[str, TensorForm] | None] = {}
    for name, shape in shapes.items():
        kind = kinds[forms[name].dtype]
        inside = [suffix for suffix in scheme_of_kind(kind).suffixes if suffix not in beside(kind)]
        if (form := packed_form(shape, kind, layout)) is not None:
            replaced |= {name + suffix: None for suffix in inside} | {name: (f"{name}{PACKED}{kind}", form)}
    pairs = (replaced.get(name, (name, form)) for name, form in forms.items())
    return dict(pair for pair in pairs if pair is not None)


def scheme_of_kind(kind: str) -> Scheme:
    """The scheme whose weights a kind packs."""
    return find_scheme(next((precision for precision in QUANTISED if precision == kind), FLOAT))


def unpack(packed: Tensor, shape: tuple[int, int], *, kind: str, layout: PackedLayout) -> dict[str, Tensor]:
    """The stored tensors that a packed weight of shape (out, in) contains, by suffix."""
    num_out, num_in = shape
    num_blocks = -(-num_out // layout.block)
    if kind == "int4":
        return _unpack_int4(packed, num_out, num_in, layout.block)
    dtype, depth = torch.uint8 if kind == "int8" else DTYPES[kind], _SIDE_BY_SIDE[kind]
    num_items = num_blocks * layout.block * num_in
    items_BKLD = packed.view(dtype)[:num_items].view(num_blocks, num_in // depth, layout.block, depth)
    rows_OI = items_BKLD.transpose(1, 2).reshape(-1, num_in)[:num_out]
    if kind == "int8":
        rows_OI = (rows_OI - layout.int8_added).view(torch.int8)  # modulo 256, as it was added
    return {"": rows_OI.contiguous()}


def _unpack_int4(packed: Tensor, num_out: int, num_in: int, block: int) -> dict[str, Tensor]:
    num_blocks, num_groups, scale_bytes = -(-num_out // block), num_in // int4.GROUP, 2 * block
    group_bytes = scale_bytes + block * int4.GROUP // 2
    groups_BG = packed[: num_blocks * num_groups * group_bytes].view(num_blocks, num_groups, group_bytes)
    scales_BGL = groups_BG[..., :scale_bytes].contiguous().view(torch.float16)
    scales_OG = scales_BGL.transpose(1, 2).reshape(-1, num_groups)[:num_out]
    # A byte holds inputs k and k + 4 of eight inputs.
    bytes_BGELD = groups_BG[..., scale_bytes:].reshape(num_blocks, num_groups, int4.GROUP // 8, block, 4)
    codes = torch.cat([bytes_BGELD & 15, bytes_BGELD >> 4], dim=-1)
    codes_OI = codes.permute(0, 3, 1, 2, 4).reshape(-1, num_in)[:num_out]
    return {"": codes_OI[:, 0::2] | (codes_OI[:, 1::2] << 4), int4.SCALE: scales_OG.contiguous()}


def unpacked(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, layout: PackedLayout
) -> Iterator[tuple[str, Tensor]]:
    """The plain state dict, tensor by tensor; `shapes` are those of the linear weights, (out, in)."""
    for name, tensor in state.items():
        weight, is_packed, kind = name.partition(PACKED)
        if not is_packed:
            yield name, tensor
            continue
        num_out, num_in = shapes[weight]
        parts = unpack(tensor, (num_out, num_in), kind=kind, layout=layout)
        for suffix in list(parts):
            yield weight + suffix, parts.pop(suffix)


class StoredPacked(nn.Module):
    """A linear layer whose weight is packed: buffers and a bias.

    `Backend.prepare` turns it into a layer that computes.
    """

    def __init__(self, linear: nn.Linear, *, kind: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        for suffix, tensor in tensors.items():
            self.register_buffer("weight" + suffix, tensor)
        self.bias = linear.bias

    @property
    def packed(self) -> Tensor:
        """The packed weight, bytes."""
        return self.get_buffer(f"weight{PACKED}{self.kind}")


def stored_packed(linear: nn.Linear, state: Mapping[str, Tensor], name: str, kind: str) -> StoredPacked:
    """The layer for the packed weight `name` in `state`, with its tensors on the meta device."""
    suffixes = (f"{PACKED}{kind}", *beside(kind))
    tensors = {suffix: torch.empty_like(state[name + suffix], device="meta") for suffix in suffixes}
    return StoredPacked(linear, kind=kind, tensors=tensors)
