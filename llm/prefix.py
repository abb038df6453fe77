"""The adapter prefix: the form in which the decoder receives a picture. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, H head size

from typing import Any, Literal, NamedTuple

# What a prompt without a picture attends to: nothing, a picture of zeros, or the learned prompt of an adapter for
# texts.
TextPrefix = Literal["none", "zeros", "learned"]


class Prefix(NamedTuple):
    """Keys and gated values of the adapter layers, (A, B, N, Q, H) each: tensors of torch, or arrays of numpy."""

    k: Any
    v: Any

    def copy(self) -> "Prefix":
        """A copy whose parts are not views of other tensors."""
        return Prefix(*(part.clone() if hasattr(part, "clone") else part.copy() for part in self))
