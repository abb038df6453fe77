"""What the layout of packed weights depends on, as data: bundles keep it in their manifest. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """What the layout of packed weights depends on. Instruction sets with equal values share it."""

    version: int
    block: int  # outputs side by side
    int8_added: int  # to weights of 8 bits

    def fits(self, other: "PackedLayout | None", precision: str) -> bool:
        """Whether weights of a precision in one layout are the same bytes in the other."""
        if other is None or (self.version, self.block) != (other.version, other.block):
            return False
        return precision != "int8" or self.int8_added == other.int8_added

    def __str__(self) -> str:
        return f"blocks of {self.block} outputs" + (f", {self.int8_added} added" if self.int8_added else "")
