"""Number formats of linear weights: the table of schemes. Imports no torch, so that `--help` can list it.

A new scheme is one entry here and one module of the same name in this folder, which defines SCHEME (scheme.py).
Everything outside this folder and runtime/devices reads the table: flags, bundles, conversion, memory plans,
`quantize`, `doctor`. A device computes with the stored weights if its `Backend.computes_in` says so. Otherwise it
dequantises them at load.
"""

from collections.abc import Mapping
from typing import Final, Literal

Precision = Literal["float", "int8", "int4"]  # of the weights of linear layers; with int4, a few are `finer`

FLOAT: Final = "float"
# Help texts of --precision for each scheme.
PRECISIONS: Final[Mapping[Precision, str]] = {
    FLOAT: "keeps --dtype",
    "int8": "rounds them to 8 bits",
    "int4": "rounds them to 4 bits, with a scale for each 32, and the output layer to 8",
}
# Help texts of --operators for each choice.
OperatorChoice = Literal["auto", "aten", "w8a8"]
OPERATORS: Final[Mapping[OperatorChoice, str]] = {
    "auto": "the device's own",
    "aten": "plain torch, which widens weights of fewer bits",
    "w8a8": "as auto, and inputs of 8-bit layers are rounded to 8 bits too",
}
BUNDLE_VERSIONS: Final[Mapping[Precision, int]] = {FLOAT: 1, "int8": 2, "int4": 3}  # older programs refuse later ones
FLOAT_TYPES: Final = ("float32", "bfloat16", "float16")
QUANTISED: Final = tuple(name for name in PRECISIONS if name != FLOAT)  # what `quantize` can write


def finer(precision: Precision) -> Precision:
    """The precision of weights that lose most when they are rounded, in a model whose other weights have this one."""
    return "int8" if precision == "int4" else precision
