"""Quantised linear layers of a loaded module, and their conversion to plain layers.

A quantised layer is an `nn.Linear` whose weight has the stored form of its scheme. The other stored tensors are
buffers, for example `weight_scale`. The layer cannot compute in this form: `Backend.prepare` replaces or
dequantises it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.int8 import INPUT_SCALE, SCALE
from llama_adapter.runtime.schemes.packed import find_packed, stored_packed
from llama_adapter.runtime.schemes.scheme import scheme_of

WEIGHT = "weight"


def load_state(sketch: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a module on the meta device the tensors of `state` for inference; they are shared, not copied.

    Raises RuntimeError if names or shapes differ from those of the module.
    """
    sketch.requires_grad_(False)  # integers have no gradient
    _sketch_stored(sketch, state)
    sketch.load_state_dict(state, assign=True)
    sketch.eval()


def _sketch_stored(sketch: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give linear layers whose weights are packed or quantised in `state` the form of these weights."""
    for name, layer in list(sketch.named_modules()):
        kind = find_packed(state, f"{name}.{WEIGHT}")
        if isinstance(layer, nn.Linear) and kind is not None:
            owner, _, own_name = name.rpartition(".")
            layer = stored_packed(layer, state, f"{name}.{WEIGHT}", kind)
            setattr(sketch.get_submodule(owner), own_name, layer)
        weight = state.get(f"{name}.{WEIGHT}")
        if isinstance(layer, nn.Linear) and weight is not None and (scheme := scheme_of(weight.dtype)) is not None:
            shape = (layer.out_features, layer.in_features)
            forms = scheme.forms(shape, layer.weight.dtype)
            store_parts(layer, {s: torch.empty(f.shape, dtype=f.dtype, device="meta") for s, f in forms.items()})
        if f"{name}.{WEIGHT}{INPUT_SCALE}" in state:
            layer.register_buffer(WEIGHT + INPUT_SCALE, torch.empty(1, device="meta"))


def load_stream(
    sketch: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    device: torch.device,
    finish: Callable[[nn.Module], None],
) -> None:
    """As `load_state`, for tensors that arrive one by one; they are moved to `device`.

    Blocks are the members of the `nn.ModuleList`s in `sketch`. `finish` is called with each block when it is complete,
    and at the end with `sketch`. If `finish` replaces a block's weights, they are released before the next block loads.
    """
    blocks = dict(_blocks(sketch))
    wanted = {name: frozenset(block.state_dict()) for name, block in blocks.items()}
    waiting: dict[str, dict[str, Tensor]] = {name: {} for name in blocks}
    rest: dict[str, Tensor] = {}
    for name, tensor in tensors:
        block = next((block for block in _owners(name) if block in waiting), None)
        if block is None:
            rest[name] = tensor.to(device)
        else:
            state = waiting[block]
            state[name.removeprefix(f"{block}.")] = tensor.to(device)
            if _is_complete(state, wanted[block]):
                load_state(blocks[block], waiting.pop(block))
                state.clear()
                finish(blocks[block])
        del tensor  # before the next one is made
    for block, state in waiting.items():
        load_state(blocks[block], state)  # raises an error that names the missing tensors
    _sketch_stored(sketch, rest)
    sketch.requires_grad_(False)
    missing, unexpected = sketch.load_state_dict(rest, strict=False, assign=True)
    missing = [name for name in missing if not any(block in blocks for block in _owners(name))]
    if missing or unexpected:
        raise RuntimeError(f"tensors are missing: {missing}, and unknown: {unexpected}")
    rest.clear()
    sketch.eval()
    finish(sketch)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Members of the outermost `nn.ModuleList`s, with their names; not members that are single layers."""
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            yield from _blocks(child, f"{prefix}{name}.")
            continue
        for index, member in child.named_children():
            if any(True for _ in member.children()):
                yield f"{prefix}{name}.{index}", member


def _owners(name: str) -> Iterator[str]:
    """Names of the modules that contain a tensor, from its name."""
    places = (place for place, character in enumerate(name) if character == ".")
    return (name[:place] for place in places)


def _is_complete(state: Mapping[str, Tensor], wanted: Collection[str]) -> bool:
    """Whether `state` has all plain names in `wanted`, and every stored tensor of the quantised ones."""
    for name in wanted:
        if name not in state:
            if find_packed(state, name) is None:
                return False
            continue
        scheme = scheme_of(state[name].dtype)
        if scheme is not None and any(name + suffix not in state for suffix in scheme.suffixes):
            return False
    return True


def store_parts(layer: nn.Linear, parts: Mapping[str, Tensor]) -> None:
    """Put the stored tensors of a weight into its layer."""
    layer.weight = nn.Parameter(parts[""], requires_grad=False)
    for suffix, tensor in parts.items():
        if suffix:
            layer.register_buffer(WEIGHT + suffix, tensor)


class StoredInt8(nn.Module):
    """The stored tensors of an 8-bit layer as buffers, for layers that compute with them."""

    weight: Tensor
    scale: Tensor  # of each output, float32
    input_scale: Tensor | None  # of all inputs, if it was calibrated
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().contiguous())
        self.register_buffer("scale", getattr(linear, WEIGHT + SCALE).float())
        self.register_buffer("input_scale", getattr(linear, WEIGHT + INPUT_SCALE, None))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())


def replace_layers(
    module: nn.Module, build: Callable[[nn.Module], nn.Module | None], *, release: Callable[[], None] = lambda: None
) -> None:
    """Replace layers inside `module` by what `build` returns for them.

    If it returns None, the layer stays. Each weight is released when its layer is replaced. Then `release` is called.
    """
    for owner in module.modules():  # not a list, which would keep all weights alive
        for name in [name for name, _ in owner.named_children()]:
            if (built := build(getattr(owner, name))) is not None:
                setattr(owner, name, built)
                release()


def replace_quantised(module: nn.Module, build: Callable[[nn.Linear, Precision], nn.Module | None]) -> None:
    """As `replace_layers`, for quantised layers. `build` takes a layer and its precision."""

    def build_quantised(layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, nn.Linear) or (scheme := scheme_of(layer.weight.dtype)) is None:
            return None
        return build(layer, scheme.name)

    replace_layers(module, build_quantised)


def dequantise_linears(module: nn.Module, *, keep: Callable[[nn.Linear], bool] = lambda layer: False) -> None:
    """Give the quantised layers inside `module`, except those to `keep`, plain weights in its float type."""
    layers = [
        (layer, scheme)
        for layer in module.modules()
        if isinstance(layer, nn.Linear) and (scheme := scheme_of(layer.weight.dtype)) is not None and not keep(layer)
    ]
    if not layers:
        return
    dtype = float_type(module)
    for layer, scheme in layers:
        weight = scheme.dequantise({suffix: getattr(layer, WEIGHT + suffix) for suffix in scheme.suffixes})
        for suffix in filter(None, scheme.suffixes):
            delattr(layer, WEIGHT + suffix)
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)


def float_type(module: nn.Module) -> torch.dtype:
    """The type of the activations: the narrowest float type, since some layers may stay in float32."""
    floats = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    return min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
