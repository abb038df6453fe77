"""The picture encoder -> one ONNX file that ATC and onnxruntime take. Checks of the file are made elsewhere."""

# B pictures, S side in pixels, Q queries, D width of the language model

import dataclasses
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import torch
from torch import Tensor, nn

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import INPUT, METADATA_KEY, OUTPUT, EncoderCard, EncoderDtype, fingerprint
from llama_adapter.runtime.graphs.defaults import DTYPE, OPSET, OPSETS
from llama_adapter.runtime.graphs.packages import require
from llama_adapter.runtime.graphs.seal import SEAL_KEY, blank_seal, seal
from llama_adapter.vision.block import plain_attention
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state, use_attention

if TYPE_CHECKING:
    import onnx_ir

DTYPES: Final[Mapping[EncoderDtype, torch.dtype]] = {"float32": torch.float32, "float16": torch.float16}
_TRACED_OPSET = 18  # of torch's exporter; what it makes is lowered from there
_IR_VERSION = 8  # that of the ONNX releases which brought opsets 17 and 18; readers that old refuse a newer one
_MAX_PROTOBUF_BYTES = 2_000_000_000  # protobuf's limit is 2 GiB; the rest is for the graph itself
_TRACED_BATCH = 2  # torch would take a batch of 1 for a constant


class _Graph(nn.Module):
    """What is traced: the encoder, with the graph's own name for its pixels."""

    def __init__(self, encoder: PictureEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        visual_query_BQD: Tensor = self.encoder(pixels_BHWC)
        return visual_query_BQD


def export_onnx(
    config: VisionConfig,
    state: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    name: str,
    dtype: EncoderDtype = DTYPE,
    opset: int = OPSET,
    check: Callable[[Path], None] | None = None,
) -> EncoderCard:
    """Write the encoder with the state dict `state` as ONNX: `input` (B, S, S, 3) -> `output` (B, Q, D), both `dtype`.

    Pixels are RGB in 0..255, the batch is free, all other sizes are fixed. The file appears complete or not at all,
    with the returned card and the digest of its bytes in its metadata; weights beyond 2 GB go to `<path>.data`. `name`
    is the model's for people.
    `check` is given the complete file before it is put in place; what it raises is raised, and nothing is left.
    Raises GraphError without the packages for it, and for weights that `dtype` cannot hold; ValueError for an
    unknown dtype or opset; RuntimeError when `state` is not of `config`.
    """
    if dtype not in get_args(EncoderDtype):
        raise ValueError(f"dtype must be float32 or float16, got {dtype!r}")
    if opset not in OPSETS:
        raise ValueError(f"opset must be 17 or 18, got {opset!r}")
    require("onnx", "onnxscript")
    card = EncoderCard(name=name, vision=config, dtype=dtype, opset=opset, fingerprint=fingerprint(state))
    model = _trace(_exported_encoder(config, state, dtype=DTYPES[dtype]))
    _lower(model, opset=opset)
    _clean(model, card=card)
    _write(model, Path(path).resolve(), check=check)
    return card


def _exported_encoder(config: VisionConfig, state: Mapping[str, Tensor], *, dtype: torch.dtype) -> PictureEncoder:
    """The encoder in `dtype`, for RGB whatever the weights were trained on: the flip goes into the weights."""
    cast = {key: _cast(key, tensor, dtype=dtype) for key, tensor in state.items()}
    is_flipped = config.channel_order == "bgr"
    if is_flipped:
        config = dataclasses.replace(config, channel_order="rgb")
        cast["clip.patch_embedding.weight"] = cast["clip.patch_embedding.weight"].flip(1).contiguous()
    encoder = encoder_from_state(config, cast)
    if is_flipped:
        encoder.mean, encoder.std = encoder.mean.flip(0).contiguous(), encoder.std.flip(0).contiguous()
    use_attention(encoder, plain_attention)  # as graph nodes that every runtime has; it scales q before the product
    return encoder


def _cast(key: str, tensor: Tensor, *, dtype: torch.dtype) -> Tensor:
    cast = tensor.detach().cpu().to(dtype)
    if not bool(torch.isfinite(cast).all()):
        why = "are too large for float16" if bool(torch.isfinite(tensor).all()) else "are not finite"
        raise GraphError(
            f"Values of `{key}` {why}",
            hint="export with --dtype float32" if "large" in why else "the checkpoint is damaged",
        )
    return cast


def _trace(encoder: PictureEncoder) -> "onnx_ir.Model":
    side, dtype = encoder.config.clip.image_size, encoder.dtype
    pixels_BHWC = torch.zeros(_TRACED_BATCH, side, side, 3, dtype=dtype)
    with _silence():
        program = torch.onnx.export(
            _Graph(encoder).eval(),
            (pixels_BHWC,),
            dynamo=True,
            opset_version=_TRACED_OPSET,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=[INPUT],
            output_names=[OUTPUT],
            external_data=False,
            verbose=False,
        )
    if program is None:
        raise AssertionError("torch.onnx.export gave no program")
    model: onnx_ir.Model = program.model
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is None or isinstance(value.shape[0], int):
            raise AssertionError(f"the exported graph is for one batch size only: {value}")
    return model


@contextmanager
def _silence() -> Iterator[None]:
    """The exporter tells its user of other people's packages and of its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _lower(model: "onnx_ir.Model", *, opset: int) -> None:
    """Give the graph another opset where all of its operators mean the same in both."""
    if opset == _TRACED_OPSET:
        return
    from onnx import defs

    for node in model.graph:
        has_changed = defs.get_schema(node.op_type, _TRACED_OPSET).since_version > opset
        # Split is the same in both when it is told the sizes of its parts.
        if has_changed and (node.op_type != "Split" or "num_outputs" in node.attributes):
            raise AssertionError(f"{node.op_type} of opset {_TRACED_OPSET} has no equal in opset {opset}")
    model.opset_imports[""] = opset


def _clean(model: "onnx_ir.Model", *, card: EncoderCard) -> None:
    """Take out what torch noted of its own sources, which names places on this machine, and put in the card."""
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.name = "picture_encoder"
    model.ir_version = _IR_VERSION
    model.producer_name, model.producer_version = "llama-adapter", None
    model.metadata_props.clear()
    model.metadata_props[METADATA_KEY] = card.to_json()


def _write(model: "onnx_ir.Model", target: Path, *, check: Callable[[Path], None] | None) -> None:
    """Into a folder beside `target`, then renamed."""
    import onnx_ir

    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    weights = f"{target.name}.data" if num_bytes > _MAX_PROTOBUF_BYTES else None
    model.metadata_props[SEAL_KEY] = blank_seal(weights)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        onnx_ir.save(model, partial / target.name, external_data=weights)
        seal(partial / target.name, weights=weights)
        if check is not None:
            check(partial / target.name)
        if weights is not None:
            os.replace(partial / weights, target.parent / weights)
        os.replace(partial / target.name, target)  # the graph last: it makes the export complete
    finally:
        shutil.rmtree(partial, ignore_errors=True)
