"""Models exported as MindIR, once for all tests, and greedy answers computed by their graphs."""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.graph_export.mindir import export_mindir
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.exported.host_program import HostProgram
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.runner import ExportedRunner
from llama_adapter.llm.exported.step import decode_step, prefill_step
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.runtime.graphs.card import GraphDtype
from llama_adapter.runtime.graphs.defaults import MindirBackend
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.runtime.graphs.session import GraphSession
from tests.app.golden import model_options
from tests.llm.exported import CARD, PICTURES

NUM_SLOTS = 16
_FOLDER = tempfile.TemporaryDirectory(prefix="mindir-")


@functools.cache
def embedded() -> LoadedModel:
    return load_bundle(embedded_model(), dtype=torch.float32)


def exported(name: str = "embedded", *, precision: str = "float32", sampling: bool = True) -> Path:
    """The folder of the embedded model's export, or of a golden adapter's."""
    return _exported(name, precision, sampling)


@functools.cache
def _exported(name: str, precision: Any, sampling: bool) -> Path:
    place = Path(_FOLDER.name) / f"{name}-{precision}-{sampling}"
    spec = CaptionerSpec() if name == "embedded" else CaptionerSpec(**model_options(name))
    given: Any = {"format": "mindir", "precision": precision, "sampling": sampling}
    run_export_decoder(DecoderJob(spec=spec, out=str(place), compare=False, **given))
    return place


@functools.cache
def program(name: str = "embedded", *, precision: str = "float32", num_slots: int = NUM_SLOTS) -> HostProgram:
    folder = exported(name, precision=precision)
    return open_mindir_program(read_card(folder), folder, MindirRuntime(), num_slots=num_slots)


@functools.cache
def encoder(name: str = "embedded", *, precision: str = "float32") -> GraphSession:
    return MindirRuntime().open(graph("encoder", folder=exported(name, precision=precision)))


def graph(kind: str, *, folder: Path | None = None) -> Path:
    """The file of a graph of this kind, of the embedded model by default."""
    place = exported() if folder is None else folder
    settings = read_card(place).settings
    assert settings is not None
    return place / str(settings[kind])


def mindir_runner(
    decoder: LlamaAdapterDecoder,
    folder: Path,
    *,
    num_slots: int,
    past: PastKeyValues | None = None,
    backend: MindirBackend = "ms",
    dtype: GraphDtype = "float32",
    embeddings: bool = False,
) -> ExportedRunner:
    """A runner of a decoder exported into `folder`."""
    pictures = PICTURES if embeddings else None
    model: Any = SimpleNamespace(decoder_config=decoder.config, name="toy", picture_format=pictures)  # no encoder
    made = export_mindir(model, decoder.state_dict().items(), folder, dtype=dtype, encoder=False)
    card = dataclasses.replace(
        CARD,
        format="mindir",
        decoder=decoder.config.to_dict(),
        dtype=dtype,
        settings=made.graphs,
        picture_format=pictures,
    )
    opened = open_mindir_program(card, folder, MindirRuntime(backend=backend), num_slots=num_slots, past=past)
    config = EngineConfig(decoder=decoder.config, dtype=np.dtype(card.dtype), num_slots=num_slots, past=past)
    return ExportedRunner(opened, config)


def place(made: HostProgram, visual_query_BQD: np.ndarray) -> None:
    """Put pictures into slots 0 and up."""
    prefix = made.project(visual_query_BQD)
    rows = [Prefix(prefix.k[:, row : row + 1], prefix.v[:, row : row + 1]) for row in range(len(visual_query_BQD))]
    made.slots.place(rows, first_slot=0)


def greedy(
    made: HostProgram,
    prompts: Sequence[Sequence[int]],
    visual_query_BQD: np.ndarray,
    *,
    num_tokens: int,
    window: int = 512,
    eos_id: int = 2,
) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """Token ids of each row up to its end token, without it, and the logits that chose each token."""
    place(made, visual_query_BQD)
    made.slots.reserve(max(map(len, prompts)))
    no_draws = [None] * len(prompts)
    chosen = made.run(prefill_step(prompts, no_draws, capacity=made.slots.capacity), first_slot=0)
    ids: list[list[int]] = [[] for _ in prompts]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    has_ended = [False] * len(prompts)
    for number in range(num_tokens):
        for row, prompt in enumerate(prompts):
            token = int(chosen.best_R[row])
            has_ended[row] |= token == eos_id or len(prompt) + number >= window
            logits[row].append(chosen.logits_RV[row])
            if not has_ended[row]:
                ids[row].append(token)
        if all(has_ended) or number + 1 == num_tokens:
            break
        positions = [min(len(prompt) + number, window - 1) for prompt in prompts]
        made.slots.reserve(max(positions) + 1)
        step = decode_step(chosen.best_R.tolist(), positions, no_draws, capacity=made.slots.capacity)
        chosen = made.run(step, first_slot=0)
    return ids, logits
