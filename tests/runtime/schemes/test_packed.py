"""Packed weights unpack to exactly the original weights, in the layout of every instruction set."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.cpu_linear import pack_weight
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.schemes.int4 import GROUP
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.packed import beside, packed_form, unpack
from llama_adapter.runtime.schemes.scheme import Parts, find_scheme

LAYOUTS = [
    PackedLayout(version=1, block=64, int8_added=128),
    PackedLayout(version=1, block=16, int8_added=128),
    PackedLayout(version=1, block=16, int8_added=0),
]
SHAPES = [(1, 32), (70, 96), (128, 64)]
KINDS = ["float32", "bfloat16", "int8", "int4"]


def stored(kind: str, shape: tuple[int, int]) -> Parts:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    if kind == "int8" or kind == "int4":
        return find_scheme(kind).quantise(weight)
    return {"": weight.to(getattr(torch, kind))}


def packed_by_hand(parts: Parts, shape: tuple[int, int], kind: str, layout: PackedLayout) -> Tensor:
    """Pack number by number, as described in linear.h."""
    num_out, num_in = shape
    weight, packed = parts[""], bytearray()
    raw = weight.view(torch.uint8).reshape(num_out, -1).numpy().tobytes()
    width = len(raw) // num_out

    def item(output: int, first: int, count: int) -> bytes:
        return raw[output * width + first : output * width + first + count] if output < num_out else bytes(count)

    for block in range(0, -(-num_out // layout.block) * layout.block, layout.block):
        outputs = range(block, block + layout.block)
        if kind == "int4":
            scales = parts["_scale"].view(torch.int16).numpy()
            for group in range(num_in // GROUP):
                for output in outputs:
                    packed += scales[output, group].tobytes() if output < num_out else bytes(2)
                for k in range(group * GROUP, (group + 1) * GROUP, 8):
                    for output in outputs:
                        eight = [byte >> shift & 15 for byte in item(output, k // 2, 4) for shift in (0, 4)]
                        packed += bytes(eight[d] | eight[d + 4] << 4 for d in range(4))
            continue
        size = weight.itemsize
        depth = {"float32": 1, "bfloat16": 2, "int8": 4}[kind]
        for k in range(0, num_in, depth):
            for output in outputs:
                items = item(output, k * size, depth * size)
                packed += bytes((byte + layout.int8_added) % 256 for byte in items) if kind == "int8" else items
    packed += bytes(-len(packed) % 64)
    return torch.frombuffer(packed, dtype=torch.uint8)


def assert_same(found: Parts, wanted: Parts, kind: str) -> None:
    assert found.keys() == {suffix for suffix in wanted if suffix not in beside(kind)}
    for suffix, tensor in found.items():
        assert tensor.dtype == wanted[suffix].dtype
        assert torch.equal(tensor, wanted[suffix])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_unpacking_is_exact(kind: str, shape: tuple[int, int], layout: PackedLayout) -> None:
    parts = stored(kind, shape)
    packed = packed_by_hand(parts, shape, kind, layout)

    form = packed_form(shape, kind, layout)
    assert form is not None
    assert form.shape == packed.shape
    assert_same(unpack(packed, shape, kind=kind, layout=layout), parts, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_pack_in_the_layout_that_they_name(kind: str, shape: tuple[int, int], library: Library) -> None:
    parts = stored(kind, shape)
    layer = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    store_parts(layer, parts)

    assert torch.equal(pack_weight(layer, library=library), packed_by_hand(parts, shape, kind, library.layout))


def test_kernels_share_packed_weights_where_the_layout_is_the_same() -> None:
    wide, narrow, signed = LAYOUTS
    assert not wide.fits(narrow, {"int4"})
    assert narrow.fits(signed, {"int4"})
    assert narrow.fits(signed, {"float"})
    assert not narrow.fits(signed, {"int8"})
    assert not narrow.fits(signed, {"int4", "int8"})
    assert not narrow.fits(dataclasses.replace(narrow, version=2), {"int4"})
    assert not narrow.fits(None, {"float"})


@pytest.mark.parametrize(("kind", "num_in", "taken"), [("float32", 6, False), ("int8", 36, True), ("int4", 36, False)])
def test_sizes_that_the_kernels_do_not_take_stay_plain(kind: str, num_in: int, taken: bool) -> None:
    assert (packed_form((8, num_in), kind, LAYOUTS[0]) is not None) is taken
