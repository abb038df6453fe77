"""The optional packages that exporting needs."""

from importlib.util import find_spec

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.extras import install_hint

EXPORT_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # all packages of the extra `onnx`
INSTALL_HINT = install_hint("onnx")


def require(*names: str) -> None:
    """Raise GraphError if one of the packages is not installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        packages, are = ("package", "is") if len(missing) == 1 else ("packages", "are")
        raise GraphError(
            f"This needs the Python {packages} {', '.join(missing)}, which {are} missing", hint=INSTALL_HINT
        )
