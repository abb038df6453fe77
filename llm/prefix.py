"""The adapter prefix: what the decoder sees of a picture. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, H head size

from typing import Any, NamedTuple


class Prefix(NamedTuple):
    """Keys and gated values of the adapter layers, (A, B, N, Q, H) each: tensors of torch, or arrays of numpy."""

    k: Any
    v: Any

    def copy(self) -> "Prefix":
        """One whose parts are no views of other tensors."""
        return Prefix(*(part.clone() if hasattr(part, "clone") else part.copy() for part in self))
