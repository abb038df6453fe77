"""Defaults and choices of an export. Imports no torch, because the command line needs them at every start."""

from typing import Final, Literal

DTYPES: Final = ("float32", "float16")
DTYPE: Final = "float32"
OPSETS: Final = (17, 18)  # older opsets lack LayerNormalization, and ATC does not support newer ones
OPSET: Final = 18
BATCH_SIZES: Final = (1, 2, 4, 8)
PRECISION_MODE: Final = "mixed_float16"
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "null")  # of ATC
LOG_LEVEL: Final = "error"
DECODER_FORMATS: Final = ("onnx", "onnx-atc", "mindir")
MindirBackend = Literal["ms", "mslite"]  # MindSpore and MindSpore Lite, as MindFormers calls them
DECODER_PRECISIONS: Final = ("float32", "float16", "int8", "int4")
