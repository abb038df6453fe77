"""Measures exported decoders like the other engines: the same random weights, run as our engine runs them."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from llama_adapter.app.models.graph_export.mindir import export_mindir
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.card import ExportCard, read_card
from llama_adapter.llm.exported.export import Written, export_decoder
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.program import DecoderProgram
from llama_adapter.llm.exported.step import decode_step, prefill_step
from llama_adapter.llm.exported.weights_file import ExportPrecision
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from scripts.peers.packages import require
from scripts.peers.weights import decoder_sizes, decoder_state, encoder_sizes, random_weights

FOLDER = "graphs-"  # followed by the precision: the name of an export in the work folder
MINDIR = "mindir"  # a folder of MindSpore's graphs


def export_random(place: Path, size: str) -> None:
    """Write the decoder of a size with the shared random weights. Raises MissingPackage if MindSpore is missing."""
    config, graphs = decoder_sizes(size), None
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        partial = Path(folder) / "partial"
        partial.mkdir()
        if place.name == MINDIR:
            require("mindspore", package="mindspore")
            model = random_weights(
                config, encoder_sizes("vit-tiny", output_dim=config.dim), dtype=torch.float32, precision="float"
            )
            made = export_mindir(model, model.decoder_state.items(), partial, encoder=False)
            graphs, written = dict(made.graphs), Written(files=made.files, dtype="float32", precision="float")
        else:
            precision: Any = place.name.removeprefix(FOLDER)
            assert precision in get_args(ExportPrecision)
            written = export_decoder(config, decoder_state(config).items(), partial, precision=precision)
        ExportCard(
            format="onnx" if graphs is None else MINDIR,
            name=f"random {size}",
            digest="",
            decoder=config.to_dict(),
            dtype=written.dtype,
            precision=written.precision,
            has_sampling=True,
            prompt="",
            channel_order="rgb",
            fingerprint={},
            files={},
            settings=graphs,
        ).write(partial)
        os.replace(partial, place)


def open_graphs(folder: Path, *, num_rows: int, num_threads: int) -> "GraphDecoder":
    """Open the export in `folder` with onnxruntime or MindSpore."""
    card = read_card(folder)
    if card.format == MINDIR:
        require("mindspore", package="mindspore")
        return GraphDecoder(open_mindir_program(card, folder, MindirRuntime(), num_slots=num_rows))
    return GraphDecoder(OnnxProgram(card, folder, threads=num_threads, num_slots=num_rows))


class GraphDecoder:
    """A program with the adapter, called as the runner calls it."""

    def __init__(self, program: DecoderProgram) -> None:
        self._program = program
        config: DecoderConfig = program.card.config
        shape = (1, config.num_queries, config.dim)
        query_BQD = np.random.default_rng(0).standard_normal(shape).astype(program.card.dtype)
        self._prefix = program.project(query_BQD)
        self._num_tokens = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._num_tokens = len(prompts[0])
        self._program.slots.reserve(self._num_tokens)
        self._program.slots.place([self._prefix] * len(prompts), first_slot=0)
        step = prefill_step(prompts, [None] * len(prompts), capacity=self._program.slots.capacity)
        token_ids: list[int] = self._program.run(step, first_slot=0).best_R.tolist()
        return token_ids

    def spread(self, num_rows: int) -> None:
        for row in range(1, num_rows):
            self._program.slots.move(0, row, num_tokens=self._num_tokens)

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        self._program.slots.reserve(position + 1)
        positions, draws = [position] * len(token_ids), [None] * len(token_ids)
        step = decode_step(token_ids, positions, draws, capacity=self._program.slots.capacity)
        chosen: list[int] = self._program.run(step, first_slot=0).best_R.tolist()
        return chosen
