"""Number formats of linear weights: the table of schemes. Imports no torch, so that `--help` can list it.

A new scheme is one entry here and one module of its name in this folder, which defines SCHEME
(scheme.py). Everything outside this folder and runtime/devices works by the table: flags, bundles, conversion, memory
plans, `quantize`, `doctor`. A device computes with the stored weights once its `Backend.computes_in` says so; until
then it dequantises them at load.
"""

from collections.abc import Mapping
from typing import Final, Literal

Precision = Literal["float", "int8", "int4"]  # of the weights of all linear layers

FLOAT: Final = "float"
# What --precision says of each scheme.
PRECISIONS: Final[Mapping[Precision, str]] = {
    FLOAT: "keeps --dtype",
    "int8": "rounds them to 8 bits",
    "int4": "rounds them to 4 bits, with a scale for each 32",
}
# What --operators says of each way to compute.
OperatorChoice = Literal["auto", "aten", "w8a8"]
OPERATORS: Final[Mapping[OperatorChoice, str]] = {
    "auto": "the device's own",
    "aten": "plain torch, which widens weights of fewer bits",
    "w8a8": "as auto, and inputs of 8-bit layers are rounded to 8 bits too",
}
QUANTISED: Final = tuple(name for name in PRECISIONS if name != FLOAT)  # what `quantize` can write
