"""Models exported as MindIR, once for all tests, and a loop that runs their graphs with numpy alone."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llama_adapter.app.decoder_export.to_mindir import ENCODER, INCREMENT, PREFILL, PREFIX, VARIABLES, export_mindir
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel, ModelSources, stream_sources
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.exported.step import Step, decode_step, prefill_step
from llama_adapter.llm.runners.draw import Draw
from llama_adapter.runtime.graphs.mindspore_session import MindsporeSession
from llama_adapter.runtime.graphs.session import GraphSession
from tests.parity.golden import GOLDEN

STEM = "model"
_FOLDER = tempfile.TemporaryDirectory(prefix="mindir-")
Open = Callable[[Path], GraphSession]


@functools.cache
def loaded(name: str, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The embedded model, or one of the golden adapters."""
    if name == "embedded":
        return load_bundle(embedded_model(), dtype=dtype)
    model, tensors = stream_sources(
        ModelSources(
            llama_dir=GOLDEN / "LLaMA/TINY",
            adapter=GOLDEN / "adapters" / f"{name}.pth",
            clip=GOLDEN / "CLIP/tiny-vit-torchscript.pt",
            visual_heads=4,
            channel_order="rgb",
        ),
        dtype=dtype,
    )
    return dataclasses.replace(model, decoder_state=dict(tensors))


@functools.cache
def exported(name: str, *, dtype: Any = "float32", has_sampling: bool = False) -> Path:
    place = Path(_FOLDER.name) / f"{name}-{dtype}-{has_sampling}"
    return export_mindir(loaded(name), place, name=STEM, dtype=dtype, has_sampling=has_sampling)


class Graphs:
    """The graphs of an exported folder, opened when they are first used."""

    def __init__(self, folder: Path, opener: Open = MindsporeSession) -> None:
        self._folder, self._open = folder, opener

    @functools.cached_property
    def prefill(self) -> GraphSession:
        return self._open(self._folder / PREFILL.format(STEM))

    @functools.cached_property
    def increment(self) -> GraphSession:
        return self._open(self._folder / INCREMENT.format(STEM))

    @functools.cached_property
    def prefix(self) -> GraphSession:
        return self._open(self._folder / VARIABLES.format(STEM) / PREFIX)

    @functools.cached_property
    def encoder(self) -> GraphSession:
        return self._open(self._folder / VARIABLES.format(STEM) / ENCODER)


@functools.cache
def graphs(name: str, *, dtype: str = "float32", has_sampling: bool = False) -> Graphs:
    return Graphs(exported(name, dtype=dtype, has_sampling=has_sampling))


class Host:
    """What a runner keeps beside the graphs: the prefix and the cache of each row."""

    def __init__(self, graphs: Graphs, visual_query_BQD: np.ndarray, *, capacity: int = 128) -> None:
        self.graphs, self.capacity = graphs, capacity
        self.prefix = graphs.prefix.run([visual_query_BQD])
        self.has_sampling = any(port.name == "uniform" for port in graphs.prefill.info.inputs)
        self.cache: list[np.ndarray] = []

    def prefill(self, prompts: Sequence[Sequence[int]], draws: Sequence[Draw | None]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (R,) and logits (R, V)."""
        width = max(map(len, prompts))
        step = prefill_step(prompts, draws, capacity=width)
        tokens, logits, *new = self.graphs.prefill.run([*self._arrays(step, step.mask_RSP), *self.prefix])
        rows, heads, _, size = new[0].shape
        self.cache = [np.zeros((rows, heads, self.capacity, size), array.dtype) for array in new]
        for kept, array in zip(self.cache, new, strict=True):
            kept[:, :, :width] = array
        return tokens, logits

    def decode(
        self, token_ids: Sequence[int], positions: Sequence[int], draws: Sequence[Draw | None]
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `prefill`, one token of each row."""
        length = max(positions)
        step = decode_step(token_ids, positions, draws, capacity=length)
        before = step.mask_RSP & (np.arange(length) < step.places_RS[:, :, None])
        mask = np.concatenate([before, np.ones((len(positions), 1, 1), bool)], axis=-1)
        past = [array[:, :, :length] for array in self.cache]
        tokens, logits, *new = self.graphs.increment.run([*self._arrays(step, mask), *self.prefix, *past])
        for kept, array in zip(self.cache, new, strict=True):
            kept[np.arange(len(positions)), :, positions] = array[:, :, 0]
        return tokens, logits

    def _arrays(self, step: Step, mask: np.ndarray) -> list[np.ndarray]:
        sampling = step.sampling if self.has_sampling else ()
        return [step.ids_RS, step.positions_RS, mask, step.wanted_T, *sampling]


def greedy(
    graphs: Graphs,
    prompts: Sequence[Sequence[int]],
    visual_query_BQD: np.ndarray,
    *,
    num_tokens: int,
    window: int = 512,
    eos_id: int = 2,
) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """Ids of each row up to its end, without it, and the logits that chose each token."""
    host, num_rows = Host(graphs, visual_query_BQD, capacity=512), len(prompts)
    tokens, logits = host.prefill(prompts, [None] * num_rows)
    ids: list[list[int]] = [[] for _ in prompts]
    seen: list[list[np.ndarray]] = [[] for _ in prompts]
    has_ended = [False] * num_rows
    for number in range(num_tokens):
        for row in range(num_rows):
            is_full = len(prompts[row]) + number >= window
            has_ended[row] = has_ended[row] or tokens[row] == eos_id or is_full
            seen[row].append(logits[row])
            if not has_ended[row]:
                ids[row].append(int(tokens[row]))
        if all(has_ended) or number + 1 == num_tokens:
            break
        positions = [min(len(prompt) + number, window - 1) for prompt in prompts]
        tokens, logits = host.decode([int(token) for token in tokens], positions, [None] * num_rows)
    return ids, seen
