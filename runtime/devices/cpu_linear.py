"""Linear layers that compute with the C kernels, for plain and quantised weights."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.runtime.kernels.arrays import ArrayLinear, packed
from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.kernels.memory import ALIGNMENT
from llama_adapter.runtime.kernels.threads import num_threads
from llama_adapter.runtime.schemes import int4, int8
from llama_adapter.runtime.schemes.layers import WEIGHT, float_type, replace_layers
from llama_adapter.runtime.schemes.packed import DTYPES, StoredPacked
from llama_adapter.runtime.schemes.scheme import dtype_name

_ACTIVATIONS = (torch.float32, torch.bfloat16)
_STEPS = {torch.uint8: int4.GROUP}  # the number of inputs must be a multiple of this, or of _STEP for other dtypes
_STEP = 4


class NativeLinear(nn.Module):
    """An `nn.Linear` for inference.

    Weights are float32, bfloat16, or stored by the schemes int8 or int4. Activations are float32 or bfloat16;
    with float32 weights, only float32. Outputs have the type of the inputs. The result of a row does not depend
    on other rows.
    """

    def __init__(self, linear: nn.Linear | StoredPacked, *, library: Library) -> None:
        """A packed weight, which must have the library's layout, is used in place. A plain weight is packed.

        `arrays` are the memory that the kernels read.
        """
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._library = library
        # Not a parameter or buffer, because packed weights can be neither moved nor saved.
        if isinstance(linear, StoredPacked):
            self.weight_dtype, memory = DTYPES[linear.kind], linear.packed.numpy()
        else:
            self.weight_dtype, memory = linear.weight.dtype, _packed(linear, library)
        kind = dtype_name(self.weight_dtype)
        self.bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        floats = {
            "scale": getattr(linear, WEIGHT + int8.SCALE) if kind == "int8" else None,
            "bias": self.bias,
            "input_scale": getattr(linear, WEIGHT + int8.INPUT_SCALE, None),
        }
        self.arrays = {kind: memory} | {
            name: tensor.detach().float().contiguous().numpy() for name, tensor in floats.items() if tensor is not None
        }
        self.layer = ArrayLinear(self.arrays, "", num_in=self.in_features, num_out=self.out_features, library=library)
        self._pointer = ctypes.addressof(self.layer.struct)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., in_features) to (..., out_features). `bias`, contiguous float32, replaces the layer's own bias.

        Raises RuntimeError, as torch does, if the number of features, the type or the device of `x` does not fit.
        """
        takes = (torch.float32,) if self.weight_dtype == torch.float32 else _ACTIVATIONS
        # The kernels do not check this. With another type or size they would read beyond the end of the tensor.
        if x.dtype not in takes or x.shape[-1:] != (self.in_features,) or not x.is_cpu:
            raise RuntimeError(
                f"a layer of {self.in_features} inputs with {self.weight_dtype} weights was given "
                f"{tuple(x.shape)} of {x.dtype} on {x.device}"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        num_rows = x.numel() // self.in_features
        pointer = self._pointer
        if bias is not None:
            struct = self.layer.part(0, self.out_features)
            struct.bias, pointer = bias.data_ptr(), ctypes.addressof(struct)
        self._library.linear(pointer, x.data_ptr(), KINDS[dtype_name(x.dtype)], num_rows, out.data_ptr(), num_threads())
        return out


def _packed(linear: nn.Linear, library: Library) -> np.ndarray:
    weight = linear.weight.detach()
    groups = getattr(linear, WEIGHT + int4.SCALE).numpy() if weight.dtype == torch.uint8 else None
    return packed(bits(weight), groups, library=library)


def pack_weight(linear: nn.Linear, *, library: Library) -> Tensor:
    """The packed weight of a plain or quantised layer as bytes, padded with zeros to a multiple of 64."""
    memory = torch.from_numpy(_packed(linear, library))
    return nn.functional.pad(memory, (0, -len(memory) % ALIGNMENT))


def takes_types(weights: torch.dtype, activations: torch.dtype) -> bool:
    """Whether the kernels compute with weights and activations of these types."""
    return dtype_name(weights) in KINDS and (weights.is_floating_point or activations in _ACTIVATIONS)


def can_take(linear: nn.Linear, *, activations: torch.dtype) -> bool:
    """Whether the kernels support this layer: its type and sizes, and the type of its inputs."""
    dtype, num_inputs = linear.weight.dtype, linear.in_features
    return num_inputs > 0 and num_inputs % _STEPS.get(dtype, _STEP) == 0 and takes_types(dtype, activations)


def install_kernels(module: nn.Module, *, library: Library, release: Callable[[], None] = lambda: None) -> None:
    """Replace the linear layers inside `module` that the kernels support.

    Their plain weights are released. `release` is called after each layer, to return free memory that the C library
    keeps; otherwise the weights would need twice their size.
    """
    activations = float_type(module)

    def build(layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, nn.Linear) and not can_take(layer, activations=activations):
            return None
        return NativeLinear(layer, library=library) if isinstance(layer, nn.Linear | StoredPacked) else None

    replace_layers(module, build, release=release)


def kernel_arrays(module: nn.Module) -> dict[str, np.ndarray] | None:
    """All that the kernels read of a prepared module, by name; None if they do not compute all of its linear layers.

    The arrays share the module's memory. bfloat16 is given as its bits, uint16.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, part in module.named_modules():
        if isinstance(part, NativeLinear):
            arrays |= {f"{name}.{key}": array for key, array in part.arrays.items()}
            continue
        own = {**part._parameters, **part._buffers}
        if hasattr(part, "in_features") or any(t is not None and t.dtype not in _ACTIVATIONS for t in own.values()):
            return None
        arrays |= {
            f"{name}.{key}": bits(tensor.detach().contiguous()) for key, tensor in own.items() if tensor is not None
        }
    return arrays


def bits(tensor: Tensor) -> np.ndarray:
    """A tensor as an array in the same memory; of bfloat16, its bits as uint16."""
    array: np.ndarray = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
