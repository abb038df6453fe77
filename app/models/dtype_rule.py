"""The rule by which `--dtype auto` chooses a type for a device whose first type is float32. Imports no torch."""

from typing import Final

LARGE_MODEL: Final = 100_000_000  # weights; smaller models use float32: fast enough, exact (see docs/devices.md)


def best_type(num_weights: int, *, large: str | None, has_few_bits: bool) -> tuple[str, str]:
    """The fastest type with acceptable errors, and the reason for it.

    `large` is the device's type for large models, if it has one. `has_few_bits` means that it computes with weights of
    8 or 4 bits as they are stored.
    """
    if num_weights < LARGE_MODEL:
        return "float32", "the model is small"
    if large is None:
        return "float32", "16-bit types are slower here"
    if has_few_bits:
        return "float32", "its weights have 8 bits"
    return large, f"faster for {num_weights / 1e9:.1f} billion weights"
