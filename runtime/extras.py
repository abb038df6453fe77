"""How to install the optional packages of this project: in a checkout, or if a wheel is installed."""

from pathlib import Path
from typing import Final

IS_CHECKOUT: Final = Path(__file__).resolve().parents[1].joinpath("pyproject.toml").is_file()
# The command that installs the required packages.
INSTALL_PROJECT: Final = (
    "`make demo` in the folder of this project, then `source .venv/bin/activate`"
    if IS_CHECKOUT
    else "pip install llama-adapter"
)


def install_hint(extra: str) -> str:
    """The command that installs the packages of the optional dependency group `extra`."""
    if IS_CHECKOUT:
        return f"in the folder of this project: pip install --editable '.[{extra}]'"
    return f"pip install 'llama-adapter[{extra}]'"
