"""The instruction sets that the kernels are written for, and the choice for this machine. This file imports no torch.

The environment variable LLAMA_ADAPTER_ISA can name an instruction set. Otherwise the best one that the processor
has is chosen.
"""

import functools
import itertools
import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llama_adapter.runtime.errors import DeviceError, UsageError

AMX = "amx_int8"  # the flag of processors with AMX-TILE, AMX-INT8 and AMX-BF16
CHOICE = "LLAMA_ADAPTER_ISA"  # environment variable: the name of an instruction set


class InstructionSet(NamedTuple):
    """A set of vector instructions that the kernels are written for."""

    name: str
    machine: str  # as `platform.machine()` names it
    # Processor flags as Linux names them, with the compiler's option for each.
    needed: Mapping[str, str]
    optional: Mapping[str, str]  # each is used if the processor has it and all flags before it

    def missing(self) -> list[str]:
        """Flags that this processor lacks."""
        return [flag for flag in self.needed if flag not in processor_flags()]

    def extras(self) -> tuple[str, ...]:
        """The optional flags that this processor has, up to the first one that it lacks."""
        return tuple(itertools.takewhile(processor_flags().__contains__, self.optional))

    def options(self, extras: Collection[str]) -> list[str]:
        """Options of the compiler for processors with these optional flags."""
        wanted = (*self.needed.values(), *(options for flag, options in self.optional.items() if flag in extras))
        return " ".join(wanted).split()

    def variants(self) -> list[tuple[str, ...]]:
        """The sets of optional flags that processors can have, beginning with the empty one."""
        flags = tuple(self.optional)
        return [flags[:count] for count in range(len(flags) + 1)]

    def variant(self, extras: Collection[str]) -> str:
        """The name of the instruction set with these optional flags: `avx2+avx_vnni`."""
        return "+".join((self.name, *extras))


INSTRUCTION_SETS = (  # the best first
    InstructionSet(
        "avx512",
        "x86_64",
        needed={
            "avx512f": "-mavx512f",
            "avx512bw": "-mavx512bw",
            "avx512vl": "-mavx512vl",
            "avx512dq": "-mavx512dq",
            "avx512_vnni": "-mavx512vnni",
        },
        optional={"avx512_bf16": "-mavx512bf16", AMX: "-mamx-tile -mamx-int8 -mamx-bf16"},
    ),
    InstructionSet(
        "avx2",
        "x86_64",
        needed={"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"},
        optional={"avx_vnni": "-mavxvnni"},
    ),
    InstructionSet(
        "neon",
        "aarch64",
        needed={"asimd": "-mcpu=generic"},
        # The compiler uses the last of these options. i8mm is before bf16 because on some Cortex-A510, Linux shows i8mm
        # and hides bf16.
        optional={
            "asimddp": "-mcpu=generic+dotprod",
            "i8mm": "-mcpu=generic+dotprod+i8mm",
            "bf16": "-mcpu=generic+dotprod+i8mm+bf16",
        },
    ),
)


def choose_instructions() -> InstructionSet | str:
    """The instruction set for this machine, or the reason why there is none.

    Raises UsageError if LLAMA_ADAPTER_ISA names none, and DeviceError if this processor lacks the one that it names.
    """
    machine = platform.machine() if sys.platform == "linux" else ""
    choice = [instructions for instructions in INSTRUCTION_SETS if instructions.machine == machine]
    if not choice:
        return f"they are for Linux on x86_64 and aarch64, and this is {sys.platform} on {platform.machine()}"
    if wanted := os.environ.get(CHOICE):
        return _named(wanted, choice)
    for instructions in choice:
        if not instructions.missing():
            return instructions
    if not processor_flags():
        return "/proc/cpuinfo does not say which instructions this processor has"
    return f"this processor has no {', '.join(choice[-1].missing())}"


def _named(wanted: str, choice: Sequence[InstructionSet]) -> InstructionSet:
    names = {instructions.name: instructions for instructions in choice}
    instructions = names.get(wanted.lower())
    if instructions is None:
        raise UsageError(
            f"{CHOICE} is {wanted!r}, which is no instruction set of the kernels",
            hint=f"it can be {' or '.join(names)}; without it, the best one is taken",
        )
    if missing := instructions.missing():
        raise DeviceError(
            f"{CHOICE} is {wanted!r}, and this processor has no {', '.join(missing)}",
            hint="without the variable, the best instruction set of the processor is taken",
        )
    return instructions


def large_dtype() -> str | None:
    """The type in which large models are twice as fast as in float32; None without instructions for it."""
    return "bfloat16" if "avx512_bf16" in processor_flags() else None


@functools.cache
def processor_flags() -> frozenset[str]:
    """Features of an x86 or ARM processor as Linux names them; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").partition(":")[2].split())
