"""Where the files that come with the package are: the embedded model and the sample pictures."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def assets() -> Path:
    """The folder `assets`: beside the package in a checkout, inside it when installed from a wheel."""
    inside = _PACKAGE / "assets"
    return inside if inside.is_dir() else _PACKAGE.parent / "assets"


def embedded_model() -> Path:
    """Bundle of the embedded model."""
    return assets() / "embedded"


def sample_pictures() -> Path:
    """Folder of the sample pictures."""
    return assets() / "pictures"
