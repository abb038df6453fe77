"""Toy decoders exported into a folder, programs that run them, and runners of every kind."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.export import export_decoder
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.runner import ExportedRunner
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT, STEPPED
from tests.llm.toys import QueuedBackend, eager, open_runner, toy_decoder

PICTURES = PictureFormat(token="<image>", token_id=7, tokens_each=4)
CARD = ExportCard(
    format="onnx",
    name="toy",
    digest="",
    decoder={},
    dtype="float32",
    precision="float",
    has_sampling=True,
    prompt="",
    channel_order="rgb",
    fingerprint={},
    files={},
)


def exported_card(
    decoder: LlamaAdapterDecoder, folder: Path, *, sampling: bool = True, embeddings: bool = False, **options: Any
) -> ExportCard:
    """Export a decoder into `folder`; `options` are those of `export_decoder`."""
    folder.mkdir(exist_ok=True)
    tensors = decoder.state_dict().items()
    written = export_decoder(decoder.config, tensors, folder, sampling=sampling, embeddings=embeddings, **options)
    return dataclasses.replace(
        CARD,
        decoder=decoder.config.to_dict(),
        dtype=written.dtype,
        precision=written.precision,
        has_sampling=sampling,
        picture_format=PICTURES if embeddings else None,
    )


def onnx_runner(
    decoder: LlamaAdapterDecoder,
    folder: Path,
    *,
    num_slots: int,
    on_device: bool = False,
    past: PastKeyValues | None = None,
    kept_places: int = 0,
    **options: Any,
) -> ExportedRunner:
    """A runner of a decoder exported to ONNX; `options` are those of `exported_card`."""
    card = exported_card(decoder, folder, **options)
    program = OnnxProgram(card, folder, threads=1, num_slots=num_slots, on_device=on_device, past=past)
    config = EngineConfig(
        decoder=decoder.config, dtype=np.dtype(card.dtype), num_slots=num_slots, past=past, kept_places=kept_places
    )
    return ExportedRunner(program, config)


SHAPES = {"exact": EXACT, "bucketed": BUCKETED, "stepped": STEPPED}
EXPORTS: dict[str, dict[str, Any]] = {
    "onnx": {},
    "onnx on a device": {"on_device": True},
    "onnx in float16": {"precision": "float16"},
    "onnx in int8": {"precision": "int8"},
}


def runner_of(kind: str, config: DecoderConfig, folder: Path | None = None, *, num_slots: int, **options: Any) -> Any:
    """A runner of `toy_decoder(config)`; `options` are those of EngineConfig.

    Its kind is `kernels`, what the product chooses; shapes of plain torch on a device with a queue; or an export into a
    new folder in `folder`, which takes embeddings in place of ids too. Exports have no blocks of the cache.
    """
    if kind == "kernels":
        return open_runner(config, num_slots=num_slots, **options)
    if kind in SHAPES:
        return eager(toy_decoder(config), num_slots=num_slots, shapes=SHAPES[kind], backend=QueuedBackend(), **options)
    given = {name: value for name, value in options.items() if name not in ("block", "spare_blocks")} | EXPORTS[kind]
    assert folder is not None
    place = folder / str(sum(1 for _ in folder.iterdir()))
    return onnx_runner(toy_decoder(config), place, num_slots=num_slots, embeddings=True, **given)
