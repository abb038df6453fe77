"""The optional packages that make and run graphs."""

import importlib
import importlib.util
from typing import Any

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.text import one_line

EXPORT_PACKAGES = ("onnx", "onnx-ir", "onnxruntime")  # all packages of the extra `onnx`
INSTALL_HINT = install_hint("onnx")


def require(*names: str) -> None:
    """Raise GraphError if one of the packages, by their pip names, is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        packages, are = ("package", "is") if len(missing) == 1 else ("packages", "are")
        raise GraphError(
            f"This needs the Python {packages} {', '.join(missing)}, which {are} missing", hint=INSTALL_HINT
        )


def import_package(name: str, *, hint: str = INSTALL_HINT) -> Any:
    """The imported package. Raises GraphError, with the hint, if it is missing or cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise GraphError(f"This needs {name}, which is not installed", hint=hint)
    try:
        return importlib.import_module(name)
    except Exception as error:  # built against another numpy, a library of CANN is missing, ...
        raise GraphError(f"{name} is installed and cannot be imported: {one_line(str(error))}", hint=hint) from error
