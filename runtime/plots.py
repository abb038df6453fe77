"""Checks before a plot is made."""

from pathlib import Path

from llama_adapter.runtime.atomic_write import require_place
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.extras import install_hint

PLOT_SUFFIXES = (".png", ".svg")


def check_plot(place: str) -> None:
    """Raise UsageError for another kind of file or if matplotlib is missing, and OSError as `require_place`."""
    if Path(place).suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"--plot writes {' or '.join(PLOT_SUFFIXES)}, got `{place}`")
    require_place(place)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib, which cannot be imported: {error}", hint=install_hint("bench")
        ) from None
