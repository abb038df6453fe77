"""Compiles the Triton kernels for GPUs, which needs none, and prints the bytes of shared memory of each.

Run as a process of its own, because Triton either compiles or interprets the kernels of a process. The arguments are
compute capabilities and types of activations, in turn: `80 fp16 90 bf16`.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from llama_adapter.runtime.devices import triton_kernels as kernels
from llama_adapter.runtime.devices.triton_calls import LARGE, MEASURED, PROPOSED, Blocks

ALIGNED = ("num_inputs", "num_outputs", "slot_stride", "head_stride", "adapter_stride", "width")
# All at once, which takes as much shared memory as the part of them that takes most.
STEP = {"NORM": True, "GATED": True, "RESIDUAL": True, "SUMS": True, "EVEN": False}
MANY_ROWS = {"GATED": True, "GELU": True}
MANY_ROWS_IN_EIGHTHS = {"RESIDUAL": True}
HOPPER = 90
# Half a head, places of a block, and switches of attention in which it differs from the first LLaMA.
LLAMA = {"GROUP": 1, "NORM": "none", "ROTARY": True, "CAPPED": False, "WINDOW": 0, "PART": 0}
ATTENTIONS: list[tuple[int, int, dict[str, Any]]] = [
    (32, 0, {"GROUP": 4}),
    (64, 0, {}),
    (64, 128, {"NORM": "all", "ROTARY": False}),
    (64, 256, {"PART": 256, "CAPPED": True, "WINDOW": 4096}),
    (48, 128, {"WINDOW": 2047}),
    (128, 128, {"GROUP": 2, "NORM": "head", "CAPPED": True, "WINDOW": 4096}),
]


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


def product(
    capability: int, pointer: str, bits: int, weight: str, scale: str, blocks: Blocks, flags: dict[str, bool]
) -> tuple[str, int]:
    """The name and shared memory of `linear` for these types of pointers."""
    types = dict.fromkeys(("x", "norm", "bias", "residual", "out"), pointer)
    types |= {"weight": weight, "scale": scale, "sums": "*fp32", "out_sums": "*fp32", "eps": "fp32"}
    types |= {"parts": "*fp32", "tickets": "*i32"}
    sizes: dict[str, Any] = dict.fromkeys(
        ("IN_EIGHTHS", "NORM", "GATED", "GELU", "RESIDUAL", "SUMS", "DEPENDENT"), False
    )
    sizes |= {"BITS": bits, "ASSEMBLY": True, "BIAS": True, "EVEN": True, **flags}
    sizes |= {"BLOCK_ROWS": blocks.rows, "BLOCK_OUT": blocks.outputs, "BLOCK_IN": blocks.inputs}
    sizes["SPLITS"] = 2 if blocks.programs > 1 else 1
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return f"{bits} bits {pointer} {blocks} {flags}", shared_bytes(kernels.linear, capability, types, sizes, **options)


def compiled(capability: int, half: str) -> Iterator[tuple[str, int]]:
    """The name and shared memory of every kernel for this compute capability (90: 9.0) and type of activations."""
    pointer, number = f"*{half}", "fp32"
    stored = {16: (pointer, pointer), 8: ("*i8", "*fp32"), 4: ("*u8", "*fp16")}
    for bits, (weight, scale) in stored.items():
        for blocks in MEASURED.blocks[bits]:
            flags = STEP if blocks.rows == 16 else MANY_ROWS
            yield product(capability, pointer, bits, weight, scale, blocks, flags)
    for bits in (8, 4) if capability >= HOPPER else ():
        yield product(capability, pointer, bits, *stored[bits], LARGE.blocks[bits][-1], STEP)
    stored[4] = "*i32", "*i64"
    # They are to be measured on an H100, and until then nothing else uses them.
    for bits, (weight, scale) in stored.items() if capability >= HOPPER else ():
        for blocks in PROPOSED.blocks[bits]:
            flags = STEP if blocks.rows == 16 else MANY_ROWS if bits == 8 else MANY_ROWS_IN_EIGHTHS
            constants = flags | {"IN_EIGHTHS": bits == 4, "DEPENDENT": True}
            yield product(capability, pointer, bits, weight, scale, blocks, constants)
    if capability >= HOPPER:  # float16 has an assembly of its own; what `STEP` adds is compiled above
        constants = {"IN_EIGHTHS": True, "DEPENDENT": True}
        yield product(capability, "*fp16", 4, *stored[4], PROPOSED.blocks[4][0], constants)
    heads = ("qkv", "q_norm", "k_norm", "k_cache", "v_cache", "adapter_k", "adapter_v", "out")
    types = dict.fromkeys(heads, pointer) | {"cos": "*fp32", "sin": "*fp32", "positions": "*i64", "table": "*i64"}
    types |= {"parts": "*fp32", "tickets": "*i32"}
    types |= dict.fromkeys(("softmax_scale", "eps", "cap"), number)
    # The kernel has no products of matrices, so that one case with blocks, one without and one in parts show what a GPU
    # takes.
    for half_size, places, switches in ATTENTIONS if capability >= HOPPER else ATTENTIONS[1:4]:
        sizes = {"HALF": half_size, "BLOCK_HALF": triton.next_power_of_2(half_size), "QUERIES": 16, "PLACES": places}
        sizes |= {"BLOCK_PLACES": 64, "DEPENDENT": capability >= HOPPER, **LLAMA, **switches}
        yield f"attention {half_size} {places}", shared_bytes(kernels.attention, capability, types, sizes)
    types = dict.fromkeys(("x", "residual", "norm", "out"), pointer) | {"sums": "*fp32", "eps": number}
    sizes = {"BLOCK": 1024, "DEPENDENT": capability >= HOPPER}
    yield "add_normed", shared_bytes(kernels.add_normed, capability, types, sizes)
    types = dict.fromkeys(("table", "out"), pointer) | {"tokens": "*i64", "sums": "*fp32"}
    yield "embed", shared_bytes(kernels.embed, capability, types, {"BLOCK": 1024, "DEPENDENT": capability >= HOPPER})
    widening = (("widen8", "*i8", "*fp32"), ("widen4", "*u8", "*fp16"), ("widen_eighths", "*i16", "*fp16"))
    for name, weight, scale in widening:
        types = {"weight": weight, "scale": scale, "out": pointer}
        yield name, shared_bytes(getattr(kernels, name), capability, types, {"BLOCK": 1024})
    types = {"x": pointer, "out": pointer, "cos": "*fp32", "sin": "*fp32"}
    yield "rotate", shared_bytes(kernels.rotate, capability, types, {"HALF": 64, "BLOCK_HALF": 64, "BLOCK_HEADS": 16})
    yield "activate", shared_bytes(kernels.activate, capability, types, {"GELU": True, "BLOCK": 1024})


if __name__ == "__main__":
    given = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps({capability: dict(compiled(int(capability), half)) for capability, half in given}))
