"""The optional packages of the export, asked for where they are used."""

from importlib.util import find_spec

from vision.errors import EncoderError

EXPORT_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # all that the extra brings
INSTALL = "pip install 'llama-adapter[onnx]'"


def require(*names: str) -> None:
    """Raise EncoderError when one of the packages is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise EncoderError(f"This needs the Python packages {', '.join(missing)}, which are missing", hint=INSTALL)
