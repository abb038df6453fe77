"""The adapter prefix: what the decoder sees of a picture. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, H head size

from typing import Any, NamedTuple


class Prefix(NamedTuple):
    """Keys and gated values of the adapter layers, (A, B, N, Q, H) each: tensors of torch, or arrays of numpy."""

    k: Any
    v: Any
