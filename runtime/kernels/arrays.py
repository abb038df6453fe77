"""The kernels on numpy arrays: linear layers, norms, and stacks of blocks. Imports no torch.

Weights are those of `runtime.devices.cpu_linear.kernel_arrays`, or those of a state dict. Numbers are float32. With
dtype bfloat16 they are rounded to it where torch rounds, and stored as its bits, uint16.
"""

# B pictures, T tokens, W width; I inputs, O outputs

import ctypes
from collections.abc import Mapping
from typing import Final

import numpy as np

from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.kernels.memory import WEIGHT_MEMORY
from llama_adapter.runtime.kernels.structs import ACTIVATIONS, BlockStruct, LinearStruct, StackStruct
from llama_adapter.runtime.kernels.threads import num_threads

Arrays = Mapping[str, np.ndarray]
_STEP: Final = 4  # the number of inputs is a multiple of it
GROUP: Final = 32  # inputs of an output that share a scale of 4-bit weights
KIND_OF: Final = {"float32": "float32", "uint16": "bfloat16", "int8": "int8", "uint8": "uint8"}  # by numpy's name


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers as they are kept in `dtype`: float32, or the bits of bfloat16, rounded to nearest even."""
    x = np.ascontiguousarray(x, np.float32)
    if dtype == "float32":
        return x
    bits = x.view(np.uint32)
    added = bits >> 16  # each step is in place: large arrays of a model are rounded here
    added &= 1
    added += 0x7FFF
    added += bits
    added >>= 16
    return added.astype(np.uint16)


def numbers(kept: np.ndarray) -> np.ndarray:
    """Inverse of `stored`."""
    return kept if kept.dtype == np.float32 else (kept.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers, rounded to `dtype`."""
    return x if dtype == "float32" else numbers(stored(x, dtype))


def shaped(arrays: Arrays, name: str, *shape: int) -> np.ndarray:
    """The numbers of an array, float32. Raises KeyError without it, and ValueError for another shape."""
    if arrays[name].shape != shape:
        raise ValueError(f"`{name}` has the shape {arrays[name].shape}, where {shape} is wanted")
    return np.ascontiguousarray(numbers(arrays[name]))


def packed(weight: np.ndarray, scale_OG: np.ndarray | None = None, *, library: Library) -> np.ndarray:
    """A plain weight (O, I) as the kernels read it: bytes in memory of `WEIGHT_MEMORY`.

    It is float32, bfloat16 as its bits, int8, or uint8 (O, I / 2) with float16 scales, as the schemes store it.
    """
    kind, num_out, num_in = KINDS[KIND_OF[weight.dtype.name]], len(weight), weight.shape[1]
    num_in *= 2 if weight.dtype == np.uint8 else 1
    num_bytes = library.packed_bytes(kind, num_out, num_in)
    bytes_ = WEIGHT_MEMORY.allocate(num_bytes)
    plain, scales = np.ascontiguousarray(weight), None if scale_OG is None else np.ascontiguousarray(scale_OG)
    scales_address = None if scales is None else scales.ctypes.data
    library.pack(kind, num_out, num_in, plain.ctypes.data, scales_address, bytes_.ctypes.data, num_threads())
    return bytes_


class ArrayLinear:
    """A linear layer of the kernels. See `runtime.devices.cpu_linear.NativeLinear`."""

    def __init__(
        self, arrays: Arrays, name: str, *, num_in: int, num_out: int, dtype: str = "float32", library: Library
    ) -> None:
        """The arrays' names begin with `name`, unless it is empty. `dtype` is that of inputs and outputs.

        The weight is packed, with the name of its kind, or plain, with the name `weight`. Raises KeyError without one,
        and ValueError for arrays of other sizes.
        """
        keys = (*KINDS, "weight", "scale", "bias", "input_scale")
        own = {key: arrays.get(f"{name}.{key}" if name else key) for key in keys}
        if (plain := own["weight"]) is not None:
            kind, groups = KIND_OF[plain.dtype.name], own.pop("scale") if plain.dtype == np.uint8 else None
            sizes = [(num_out, num_in // 2 if kind == "uint8" else num_in), (num_out, num_in // GROUP)]
            if plain.shape != sizes[0] or num_in % (GROUP if kind == "uint8" else _STEP):
                raise ValueError(f"`{name}` has a weight {plain.shape}, where {sizes[0]} is wanted")
            if kind == "uint8" and (groups is None or groups.dtype != np.float16 or groups.shape != sizes[1]):
                raise ValueError(f"`{name}` lacks its scales {sizes[1]}")
            own[kind] = packed(plain, groups, library=library)
        kind, weight = next(((kind, own[kind]) for kind in KINDS if own[kind] is not None), ("", None))
        if weight is None:
            raise KeyError(name)
        num_bytes = library.packed_bytes(KINDS[kind], num_out, num_in)
        self._weight = weight[:num_bytes]
        self._scale, bias, input_scale = (own.get(key) for key in ("scale", "bias", "input_scale"))
        self._bias = None if bias is None else np.ascontiguousarray(numbers(bias))
        self._input_scale = 0.0 if input_scale is None else input_scale.item()
        given = [array.nbytes for array in (self._scale, self._bias) if array is not None]
        if self._weight.nbytes != num_bytes or any(size != 4 * num_out for size in given):
            raise ValueError(f"`{name}` has {self._weight.nbytes} and {given} bytes, where {num_bytes} are wanted")
        if (kind == "int8") != (self._scale is not None):
            raise ValueError(f"`{name}` has scales, which go with 8-bit weights, or lacks them")
        self._kind, self._num_in, self._num_out, self._library = KINDS[kind], num_in, num_out, library
        self._dtype = "float32" if kind == "float32" else dtype
        self.struct = self.part(0, num_out)

    def part(self, first: int, num_out: int) -> LinearStruct:
        """Outputs first..first+num_out-1, in the same memory. `first` must be a multiple of 64."""
        assert first % 64 == 0, "weights are packed in blocks of 64 outputs"
        return LinearStruct(
            kind=self._kind,
            num_in=self._num_in,
            num_out=num_out,
            weight=self._weight.ctypes.data + self._library.packed_bytes(self._kind, first, self._num_in),
            scale=None if self._scale is None else self._scale[first:].ctypes.data,
            bias=None if self._bias is None else self._bias[first:].ctypes.data,
            input_scale=self._input_scale,
        )

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """(..., I) -> (..., O), float32."""
        given = stored(x, self._dtype)
        out = np.empty((*x.shape[:-1], self._num_out), given.dtype)
        kind = KINDS[self._dtype]
        num_rows = given.size // self._num_in
        address = ctypes.addressof(self.struct)
        self._library.linear(address, given.ctypes.data, kind, num_rows, out.ctypes.data, num_threads())
        return numbers(out)


class LayerNorm:
    """Layer norm over the last dimension, computed in float32 and rounded to `dtype`."""

    def __init__(self, arrays: Arrays, name: str, *, width: int, eps: float, dtype: str) -> None:
        self.weight, self.bias = (shaped(arrays, f"{name}.{part}", width) for part in ("weight", "bias"))
        self._eps, self._dtype = np.float32(eps), dtype

    def __call__(self, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt(np.square(centred).mean(-1, keepdims=True) + self._eps)
        return rounded(centred / scale * self.weight + self.bias, self._dtype)


class Blocks:
    """Pre-norm transformer blocks of one width: x += attention(norm1(x)); x += down(activation(up(norm2(x)))).

    See runtime/kernels/encoder.h for the types in which it computes.
    """

    def __init__(
        self,
        arrays: Arrays,
        name: str,
        *,
        count: int,
        width: int,
        hidden_dim: int,
        num_heads: int,
        activation: str,
        eps: float,
        dtype: str,
        library: Library,
    ) -> None:
        """The arrays of block i begin with `name`.i. `activation` is a key of `ACTIVATIONS`."""
        self._library, self._dtype = library, dtype
        self._kept: list[object] = []  # the structures point to these
        structs = [self._block(arrays, f"{name}.{index}", width=width, hidden_dim=hidden_dim) for index in range(count)]
        # Attention multiplies bfloat16 after such weights if the instruction set can: encoder.h.
        self.has_few_bits = any(struct.qkv.kind in (KINDS["int8"], KINDS["uint8"]) for struct in structs)
        self._struct = StackStruct(
            width=width,
            num_heads=num_heads,
            hidden_dim=hidden_dim,
            num_blocks=count,
            activation=ACTIVATIONS[activation],
            norm_eps=eps,
            blocks=(BlockStruct * count)(*structs),
        )

    def _block(self, arrays: Arrays, name: str, *, width: int, hidden_dim: int) -> BlockStruct:
        sizes = {
            "qkv": ("attention.qkv", width, 3 * width),
            "out": ("attention.out", width, width),
            "up": ("mlp.up", width, hidden_dim),
            "down": ("mlp.down", hidden_dim, width),
        }
        layers = {
            key: ArrayLinear(arrays, f"{name}.{own}", num_in=num_in, num_out=num_out, library=self._library)
            for key, (own, num_in, num_out) in sizes.items()
        }
        norms = {
            f"{norm}_{part}": shaped(arrays, f"{name}.{norm}.{part}", width)
            for norm in ("norm1", "norm2")
            for part in ("weight", "bias")
        }
        self._kept += [layers, norms]
        return BlockStruct(
            **{key: array.ctypes.data for key, array in norms.items()},
            **{key: layer.struct for key, layer in layers.items()},
        )

    def __call__(self, x_BTW: np.ndarray, num_kept: int | None = None) -> np.ndarray:
        """(B, T, W) -> (B, num_kept, W) in new memory; by default, all tokens are kept."""
        x = x_BTW.astype(np.float32, order="C", copy=True)
        num_pictures, num_tokens, width = x.shape
        kept = num_tokens if num_kept is None else min(num_kept, num_tokens)
        address = ctypes.addressof(self._struct)
        self._library.blocks(address, x.ctypes.data, num_pictures, num_tokens, kept, num_threads())
        return rounded(x.ravel()[: num_pictures * kept * width].reshape(num_pictures, kept, width), self._dtype)
