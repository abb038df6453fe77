"""Writes a decoder as ONNX: one weight file, the graph of a step, and the graph that projects pictures."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.onnx_graph import GraphBuilder, Storing
from llama_adapter.llm.exported.step import num_prefix_layers
from llama_adapter.llm.exported.weights_file import ExportPrecision, WeightsFile
from llama_adapter.runtime.graphs.packages import require

if TYPE_CHECKING:
    from torch import Tensor

DECODER_FILE: Final = "decoder.onnx"
PREFIX_FILE: Final = "prefix.onnx"
SLOTS_FILE: Final = "slots.onnx"  # the graph that copies rows if the cache is in device memory
WEIGHTS_FILE: Final = "decoder.weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The files of an export, and the number formats of its graphs."""

    files: tuple[str, ...]
    dtype: str  # of activations and cache
    precision: str  # of the linear layers' weights: float, int8, int4


def export_decoder(
    config: DecoderConfig,
    tensors: "Iterable[tuple[str, Tensor]]",
    folder: Path,
    *,
    precision: ExportPrecision = "float32",
    storing: Storing = "in_place",
    sampling: bool = True,
    embeddings: bool = False,
) -> Written:
    """Write the decoder with these tensors of its state dict, plain or quantised, into an existing folder.

    Tensors are read one by one, so that memory holds one of them. `storing` is `in_place` for onnxruntime, and
    `returned` for compilers whose runtime copies inputs and outputs; this graph has no branches. `stacked` is like
    `returned`, for ATC, whose runtime accepts at most 128 dimensions in all inputs together. With `embeddings`, the
    graph takes embeddings in place of ids, for pictures.

    Raises GraphError if onnx or onnx_ir is missing, and for numbers that are not finite in `precision`.
    """
    require("onnx", "onnx-ir")
    import onnx_ir as ir

    with (folder / WEIGHTS_FILE).open("wb") as file:
        weights = WeightsFile(file, precision=precision)
        weights.write(tensors, linears=linear_names(config))
    builder = GraphBuilder(config, weights, folder=folder, location=WEIGHTS_FILE, storing=storing)
    branch: Any = "never" if not sampling else "branch" if storing == "in_place" else "always"
    ir.save(builder.step(sampling=branch, embeddings=embeddings), folder / DECODER_FILE)
    files = [WEIGHTS_FILE, DECODER_FILE]
    if storing == "in_place":
        ir.save(builder.slots(), folder / SLOTS_FILE)
        files.append(SLOTS_FILE)
    if num_prefix_layers(config):
        ir.save(builder.prefix(), folder / PREFIX_FILE)
        files.append(PREFIX_FILE)
    kind = "float" if precision in ("float32", "float16") else precision
    return Written(files=tuple(files), dtype=weights.float_dtype, precision=kind)


def linear_names(config: DecoderConfig) -> list[str]:
    """Names of the matrices that may be quantised: those of all linear layers."""
    parts = ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down")
    names = [f"layers.{layer}.{part}.weight" for layer in range(config.num_layers) for part in parts]
    if config.separate_adapter_kv:
        names += [f"adapter.kv.{layer}.weight" for layer in range(config.num_adapter_layers)]
    return [*names, "head.weight"]
