"""The wheel's declarations of everything that we call, and whether Huawei's meta kernels agree with our references."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llama_adapter.runtime.devices.npu import open_npu
from llama_adapter.runtime.devices.npu_load import load_torch_npu
from tests.npu import symbols
from tests.npu.inside.references import REFERENCES

NUMBERS = {torch.float16: 5, torch.bfloat16: 15}  # numbers of dtypes in schemas
UNDECLARED = ("npu_apply_rotary_pos_emb",)  # writes in place although the schema does not declare it


def resolve(path: str) -> Any:
    """The object at a dotted path whose first part is a module."""
    import npugraph_ex
    import torch_npu
    import torchair
    from npugraph_ex.configs import compiler_config as _  # noqa: F401 - so that the lazy module finds it
    from torchair.configs import compiler_config  # noqa: F401 - so that the lazy module finds it

    name, *rest = path.split(".")
    found: Any = {"torch_npu": torch_npu, "torchair": torchair, "npugraph_ex": npugraph_ex}[name]
    for part in rest:
        found = getattr(found, part)
    return found


def signature(function: Any) -> str:
    bare = inspect.signature(function)
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def schema(path: str) -> str:
    assert callable(resolve(path))
    return str(getattr(torch.ops.npu, path.removeprefix("torch_npu.")).default._schema)


def call_problems() -> list[str]:
    """Calls in our code that a signature or schema would not accept."""
    problems = []
    for use in sorted(symbols.all_uses()):
        if not use.is_called:
            continue
        if use.path in symbols.OPERATORS:
            arguments = getattr(torch.ops.npu, use.path.removeprefix("torch_npu.")).default._schema.arguments
            positional = [argument for argument in arguments if not argument.kwarg_only]
            if use.num_positional > len(positional) or set(use.keywords) - {argument.name for argument in arguments}:
                problems.append(f"{use}")
        else:
            try:
                inspect.signature(resolve(use.path)).bind(*[None] * use.num_positional, **dict.fromkeys(use.keywords))
            except TypeError as error:
                problems.append(f"{use}: {error}")
    return problems


def sample_arguments(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    x = torch.randn(2, 3, 64).to(dtype)
    query, key, cos, sin = (torch.randn(2, 3, heads, 64).to(dtype) for heads in (4, 4, 1, 1))
    cache, new = torch.randn(2, 4, 8, 64).to(dtype), torch.randn(2, 4, 1, 64).to(dtype)
    return {
        "npu_rms_norm": (x, torch.randn(64).to(dtype), 1e-6),
        "npu_apply_rotary_pos_emb": (query, key, cos, sin),
        "npu_swiglu": (x,),
        "scatter_update_": (cache, torch.tensor([3, 7]), new, -2),
    }


def linear_arguments(dtype: torch.dtype) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments and keywords of the products with weights of 8 and 4 bits."""
    x = torch.randn(3, 64).to(dtype)
    bits8 = torch.randint(-127, 128, (3, 64), dtype=torch.int8)
    weight = torch.randint(-127, 128, (32, 64), dtype=torch.int8).T
    packed = torch.randint(-(2**31), 2**31, (64, 4), dtype=torch.int32)
    bias = torch.randn(32).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    groups = (x, packed, torch.rand(2, 32).to(dtype), None, None, None, bias, 32)
    scales = {"pertoken_scale": torch.rand(3), "bias": torch.randn(32), "output_dtype": NUMBERS[dtype]}
    return {
        "npu_weight_quant_batchmatmul": (groups, {}),
        "npu_dynamic_quant": ((x,), {}),
        "npu_quant_matmul": ((bits8, weight, torch.rand(32)), scales),
    }


def as_declared(name: str) -> Callable[..., Any]:
    """Our reference, but the rotation does not change its arguments, as its schema declares."""
    reference = REFERENCES[name]
    if name in UNDECLARED:
        return lambda *arguments: reference(*[argument.clone() for argument in arguments])
    return reference


def compare_references() -> dict[str, str]:
    """Our references, registered for the CPU, compared with the schemas and the meta kernels of the wheel."""
    library = torch.library.Library("npu", "IMPL")
    outcomes = {}
    for name, arguments in sample_arguments(torch.float16).items():
        operator = getattr(torch.ops.npu, name).default
        library.impl(name, as_declared(name), "CPU")
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        for dtype in (torch.float16, torch.float32):
            _compare(operator, REFERENCES[name], sample_arguments(dtype)[name])
        outcomes[name] = "agrees with the schema and, in shape and dtype, with the meta kernel (float16, float32)"
        if name in UNDECLARED:
            outcomes[name] += "; it writes over its arguments, which the schema does not say"
    for name, (arguments, keywords) in linear_arguments(torch.float16).items():
        operator = getattr(torch.ops.npu, name).default
        library.impl(name, REFERENCES[name], "CPU")
        torch.library.opcheck(operator, arguments, keywords, test_utils=("test_schema", "test_faketensor"))
        for dtype in (torch.float16, torch.bfloat16):
            arguments, keywords = linear_arguments(dtype)[name]
            _compare(operator, REFERENCES[name], arguments, **keywords)
        outcomes[name] = "agrees with the schema and, in shape and dtype, with the meta kernel (float16, bfloat16)"
    return outcomes


def _compare(operator: Any, reference: Callable[..., Any], arguments: tuple[Any, ...], **keywords: Any) -> None:
    given = (arguments, keywords)
    args, kwargs = pytree.tree_map_only(Tensor, lambda value: value.to("meta"), given)
    meta = operator(*args, **kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, given)
    real = reference(*args, **kwargs)
    for theirs, ours in zip(_tuple(meta), _tuple(real), strict=True):
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype), (str(operator), theirs, ours)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def attention_shapes() -> dict[str, Any]:
    """The shapes and dtypes of npu_fusion_attention_v3 and of our reference; its meta kernel needs a device."""
    query = torch.randn(2, 4, 3, 64, dtype=torch.float16)
    mask = torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    given = (4, "BNSD", None, None)
    meta = torch.ops.npu.npu_fusion_attention_v3(*[query.to("meta")] * 3, *given, mask.to("meta"), 0.125)
    real = REFERENCES["npu_fusion_attention_v3"](query, query, query, *given, mask, 0.125)
    return {"meta": _described(meta), "ours": _described(real)}


def _described(outputs: tuple[Tensor, ...]) -> list[Any]:
    """Output, largest scores and sums. The other outputs are for a backward pass."""
    return [[[*value.shape], str(value.dtype)] for value in outputs[:3]]


def facts() -> dict[str, Any]:
    torch_npu = load_torch_npu()
    rounding = [rounds_float32()]
    open_npu(0)
    rounding.append(rounds_float32())

    return {
        "version": torch_npu.__version__.partition("+")[0],
        "operators": {path: schema(path) for path in symbols.OPERATORS},
        "functions": {path: signature(resolve(path)) for path in symbols.FUNCTIONS},
        "methods": [name for name in symbols.METHODS if callable(resolve(name))],
        "problems": call_problems(),
        "references": compare_references(),
        "attention": attention_shapes(),
        "backends": torch._dynamo.list_backends(exclude_tags=()),
        "options": graph_options(),
        "rounding": rounding,
    }


def rounds_float32() -> dict[str, bool]:
    return {name: resolve(name) for name in symbols.SETTINGS if name.endswith("allow_hf32")}


def graph_options() -> list[str]:
    from torchair.configs.npugraphex_config import _NpuGraphExConfig

    return sorted(_NpuGraphExConfig.ALLOWED_OPTIONS)
