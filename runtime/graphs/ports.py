"""An input or output of an exported graph."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """An input or an output of a graph; -1 stands for a size that is open."""

    name: str
    dtype: str  # numpy's name, or the file's own where numpy has none
    shape: tuple[int, ...]

    @property
    def free_dims(self) -> tuple[int, ...]:
        """Which dimensions are open."""
        return tuple(dim for dim, size in enumerate(self.shape) if size < 0)

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('any' if size < 0 else str(size) for size in self.shape)})"
