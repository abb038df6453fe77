"""The two forms in which a decoder receives a picture: an adapter's prefix, and tokens. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, H head size, S tokens, D model width

from dataclasses import dataclass, field
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
        return Prefix(*map(copied, self))


def copied(part: Any) -> Any:
    """A copy of a tensor or an array, which is no view of another."""
    return part.clone() if hasattr(part, "clone") else part.copy()


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTokens:
    """Embeddings that replace consecutive tokens of a prompt. The ids in their places are not read.

    Two are equal if they stand in the same place and have the same digest: ids do not tell pictures apart.
    """

    start: int  # place in the prompt of the first
    embeddings_SD: Any = field(compare=False, repr=False)  # a tensor of torch, or an array of numpy
    digest: str  # of what was embedded: the picture after its preprocessing

    @property
    def stop(self) -> int:
        """The place behind the last one."""
        return self.start + len(self.embeddings_SD)
