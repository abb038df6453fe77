"""Compiles the Triton kernels for several GPUs, which needs none, and prints the bytes of shared memory of each.

Run as a process of its own, because Triton either compiles or interprets the kernels of a process.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from llama_adapter.runtime.devices import triton_kernels as kernels
from llama_adapter.runtime.devices.triton_calls import choose_blocks

ALIGNED = ("num_inputs", "num_outputs", "slot_stride", "head_stride", "adapter_stride", "width")
STEP: list[dict[str, bool]] = [{"NORM": True, "SWIGLU": True}, {"RESIDUAL": True, "SUMS": True, "EVEN": False}]
MANY_ROWS: list[dict[str, bool]] = [{"SWIGLU": True}]


def shared_bytes(kernel: Any, capability: int, types: dict[str, str], sizes: dict[str, Any], **options: int) -> int:
    """Compile a kernel for a GPU. `types` are those of its pointers, `sizes` its constants; other values are int32."""
    values = [name for name in kernel.arg_names if name not in sizes]
    signature = {name: types.get(name, "i32") if name in values else "constexpr" for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in values and (signature[name].startswith("*") or name in ALIGNED)
    }
    source = ASTSource(kernel, signature, sizes, aligned)
    return int(compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def compiled(capability: int, half: str) -> Iterator[tuple[str, int]]:
    """The name and shared memory of every kernel for this compute capability (90: 9.0) and type of activations."""
    pointer, number = f"*{half}", "fp32"
    stored = {16: (pointer, pointer), 8: ("*i8", "*fp32"), 4: ("*u8", "*fp16")}
    for bits, (weight, scale) in stored.items():
        for blocks in dict.fromkeys(choose_blocks(bits, rows) for rows in (1, 17, 33)):
            for flags in STEP if blocks.rows == 16 else MANY_ROWS:
                types = dict.fromkeys(("x", "norm", "bias", "residual", "out"), pointer)
                types |= {"weight": weight, "scale": scale, "sums": "*fp32", "out_sums": "*fp32", "eps": number}
                types |= {"parts": "*fp32", "tickets": "*i32"}
                sizes = {"BITS": bits, "ASSEMBLY": capability >= 90, "BIAS": True}
                sizes |= {"NORM": False, "SWIGLU": False, "RESIDUAL": False, "SUMS": False, "EVEN": True, **flags}
                sizes |= {"BLOCK_ROWS": blocks.rows, "BLOCK_OUT": blocks.outputs, "BLOCK_IN": blocks.inputs}
                sizes["SPLITS"] = 2 if blocks.programs > 1 else 1
                options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
                yield f"{bits} bits {blocks} {flags}", shared_bytes(kernels.linear, capability, types, sizes, **options)
    heads = ("qkv", "k_cache", "v_cache", "adapter_k", "adapter_v", "out")
    types = dict.fromkeys(heads, pointer) | {"cos": "*fp32", "sin": "*fp32", "positions": "*i64", "table": "*i64"}
    types["softmax_scale"] = number
    for half_size, places in ((32, 0), (64, 0), (64, 128)):
        sizes = {"HALF": half_size, "QUERIES": 16, "PLACES": places, "BLOCK_PLACES": 64}
        yield f"attention {half_size} {places}", shared_bytes(kernels.attention, capability, types, sizes)
    types = {"tokens": "*i64", "table": pointer, "out": pointer, "sums": "*fp32"}
    yield "embed", shared_bytes(kernels.embed, capability, types, {"BLOCK": 1024})
    for name, weight, scale in (("widen8", "*i8", "*fp32"), ("widen4", "*u8", "*fp16")):
        types = {"weight": weight, "scale": scale, "out": pointer}
        yield name, shared_bytes(getattr(kernels, name), capability, types, {"BLOCK": 1024})
    types = {"x": pointer, "out": pointer, "cos": "*fp32", "sin": "*fp32"}
    yield "rotate", shared_bytes(kernels.rotate, capability, types, {"HALF": 64, "BLOCK_HEADS": 16})
    yield "swiglu", shared_bytes(kernels.swiglu, capability, types, {"BLOCK": 1024})


if __name__ == "__main__":
    print(json.dumps(dict(compiled(int(sys.argv[1]), sys.argv[2]))))
