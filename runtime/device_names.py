"""Names that other systems have for devices -> ours. Imports no torch."""

_OURS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "npu": "npu", "ascend": "npu"}


def our_device(name: str, *, index: int | None = None) -> str | None:
    """`gpu:1` -> `cuda:1`, `Ascend` -> `npu`, `Ascend` with index 2 -> `npu:2`; None for an unknown name."""
    kind, colon, own_index = name.lower().partition(":")
    ours = _OURS.get(kind)
    if ours is None or (colon and not own_index.isdecimal()):
        return None
    if ours == "cpu":
        return ours
    number = own_index if colon else "" if index is None else str(index)
    return f"{ours}:{number}" if number else ours
