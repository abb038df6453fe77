"""What the layout of packed weights depends on, as data that bundles store in their manifest. Imports no torch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

LAYOUT_VERSION: Final = 1  # see linear.h
PACKED: Final = "_packed_"  # between the name of a weight and its kind, in the names of packed tensors
PACKED_KINDS: Final = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """What the layout of packed weights depends on. Instruction sets with equal values share it."""

    version: int
    block: int  # number of adjacent outputs
    int8_added: int  # number that is added to 8-bit weights

    def fits(self, other: "PackedLayout | None", precisions: Collection[str]) -> bool:
        """Whether weights that have these precisions are the same bytes in both layouts."""
        if other is None or (self.version, self.block) != (other.version, other.block):
            return False
        return "int8" not in precisions or self.int8_added == other.int8_added

    def __str__(self) -> str:
        return f"blocks of {self.block} outputs" + (f", {self.int8_added} added" if self.int8_added else "")
