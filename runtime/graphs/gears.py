"""Gears: the combinations of sizes that a graph with several dynamic dimensions is compiled for, and their limits."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from llama_adapter.runtime.graphs.card import Port

Gear = Mapping[str, int]  # name of a dynamic dimension -> size

MAX_GEARS: Final = 100  # limit of --dynamic_dims and --dynamic_batch_size, which need at least 2
MAX_RANK: Final = 4  # limit of --input_format=ND
MAX_DIMS: Final = 128  # limit for all inputs together: ACL_MAX_DIM_CNT, because ACL passes a gear as one list
MAX_STRING: Final = 4096  # characters of the text with which ais_bench sets a gear
_NAME: Final = re.compile(r"[^:;,\s]+")


def parse_gear(text: str) -> dict[str, int]:
    """`R=1,S=256` -> sizes by name. Raises ValueError."""
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    if not all(name.strip() and size.strip().isdecimal() for name, size in pairs):
        raise ValueError(f"wanted sizes by name such as R=1,S=256, got {text!r}")
    return {name.strip(): int(size) for name, size in pairs}


def with_sums(gear: Gear, inputs: Sequence[Port]) -> dict[str, int]:
    """The gear, with sizes added for names such as `P_plus_S` that it does not contain."""
    sums = {}
    for name in {name for port in inputs for name in port.symbols} - set(gear):
        parts = name.split("_plus_")
        if len(parts) > 1 and all(part in gear for part in parts):
            sums[name] = sum(gear[part] for part in parts)
    return {**gear, **sums}


def shape_in(port: Port, gear: Gear) -> tuple[int, ...]:
    """The shape of an input or output in a gear; -1 for names that are not in the gear."""
    names = iter(port.symbols)
    return tuple(gear.get(next(names, ""), -1) if size < 0 else size for size in port.shape)


def num_bytes(ports: Sequence[Port], gear: Gear) -> int:
    """Bytes of all ports in a gear."""
    return sum(math.prod(shape_in(port, gear)) * np.dtype(port.dtype).itemsize for port in ports)


def check_gears(inputs: Sequence[Port], gears: Sequence[Gear]) -> None:
    """Raise ValueError for inputs and gears that ATC, ACL or ais_bench refuse."""
    if not 2 <= len(gears) <= MAX_GEARS:
        raise ValueError(f"wanted 2 to {MAX_GEARS} gears, got {len(gears)}")
    symbols = {name for port in inputs for name in port.symbols}
    for port in inputs:
        if not _NAME.fullmatch(port.name):
            raise ValueError(f"the name of the input {port.name!r} has a character that separates names")
        if len(port.symbols) != len(port.free_dims) or not all(port.symbols):
            raise ValueError(f"the input `{port.name} {port}` has open dimensions without a name")
        if len(port.shape) > MAX_RANK:
            raise ValueError(f"the input `{port.name} {port}` has {len(port.shape)} dimensions, more than {MAX_RANK}")
    num_dims = sum(len(port.shape) for port in inputs)
    if num_dims > MAX_DIMS:
        raise ValueError(f"the {len(inputs)} inputs have {num_dims} dimensions together, and ACL takes {MAX_DIMS}")
    for gear in gears:
        if set(gear) != symbols or any(type(size) is not int or size < 1 for size in gear.values()):
            raise ValueError(f"a gear gives a size of at least 1 to {', '.join(sorted(symbols))}, got {dict(gear)}")
        # ais_bench passes a gear as text: `ids:1,4;cache:1,64,128`.
        text = ";".join(f"{port.name}:{','.join(map(str, shape_in(port, gear)))}" for port in inputs)
        if len(text) > MAX_STRING:
            raise ValueError(f"the names and sizes of a gear take {len(text)} characters, and ais_bench {MAX_STRING}")
    if len({tuple(sorted(gear.items())) for gear in gears}) != len(gears):
        raise ValueError("a gear is given twice")
