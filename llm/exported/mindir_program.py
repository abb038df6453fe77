"""Opens the MindIR graphs of an exported decoder."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.host_program import HostProgram
from llama_adapter.llm.exported.mindir_graphs import INCREMENT, PREFILL, PREFIX, step_inputs
from llama_adapter.llm.exported.step import num_prefix_layers
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.runtime.graphs.session import GraphSession


def open_mindir_program(
    card: ExportCard, folder: Path, runtime: MindirRuntime, *, num_slots: int, past: PastKeyValues | None = None
) -> HostProgram:
    """Open the decoder of a folder. Raises GraphError for graphs that cannot be run or do not fit the card.

    MindSpore keeps separate weights for every graph that it opens, so the increment graph also runs prompts there.
    """
    graphs: Mapping[str, Any] = card.settings or {}
    with ExitStack() as stack:
        opened: dict[str, GraphSession] = {}
        needed = [INCREMENT] if runtime.backend == "ms" else [PREFILL, INCREMENT]
        for kind in needed + ([PREFIX] if num_prefix_layers(card.config) else []):
            if kind not in graphs:
                raise GraphError(f"The card of `{folder}` names no {kind} graph", hint="export the decoder again")
            opened[kind] = stack.enter_context(closing(runtime.open(folder / str(graphs[kind]))))
        for kind in needed:
            _check_inputs(opened[kind], card, has_cache=kind == INCREMENT)
        program = HostProgram(
            card,
            prefill=opened.get(PREFILL),
            increment=opened[INCREMENT],
            prefix=opened.get(PREFIX),
            num_slots=num_slots,
            past=past,
        )
        stack.pop_all()
    return program


def _check_inputs(graph: GraphSession, card: ExportCard, *, has_cache: bool) -> None:
    """Raise GraphError if types and sizes do not fit. Names are not compared, because MindSpore Lite changes them."""
    ports = step_inputs(
        card.config,
        dtype=card.dtype,
        has_cache=has_cache,
        has_sampling=card.has_sampling,
        has_embeddings=card.picture_format is not None,
    )
    wanted = [(port.dtype, port.shape) for port in ports]
    if [(port.dtype, port.shape) for port in graph.info.inputs] != wanted:
        raise GraphError(
            f"`{graph.info.file}` has other inputs than a decoder of its card",
            hint="the folder is mixed from two exports: copy it again, or export the decoder again",
        )
