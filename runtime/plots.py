"""Checks before a plot is made."""

from pathlib import Path

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.extras import install_hint

PLOT_SUFFIXES = (".png", ".svg")


def check_plot(place: str) -> None:
    """Raise UsageError if a plot cannot be written to this file, or if matplotlib is missing."""
    if Path(place).suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"--plot writes {' or '.join(PLOT_SUFFIXES)}, got `{place}`")
    if not Path(place).absolute().parent.is_dir():
        raise UsageError(f"The folder of `{place}` does not exist")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--plot needs matplotlib, which cannot be imported: {error}", hint=install_hint("bench")
        ) from None
