"""Opens the OMs of an exported decoder that ATC compiled."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.export import DECODER_FILE, PREFIX_FILE
from llama_adapter.llm.exported.host_program import HostProgram
from llama_adapter.llm.exported.om_steps import OmPrefix, OmStep
from llama_adapter.llm.exported.step import num_prefix_layers
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.om_dims import OmDimsSession

DECODER_OM: Final = "decoder.om"
PREFIX_OM: Final = "prefix.om"


def open_om_program(
    card: ExportCard, folder: Path, *, device_id: int, num_slots: int, past: PastKeyValues | None = None
) -> tuple[HostProgram, int]:
    """Open the decoder of a folder; also returns the most tokens of a row, including `past`, that its gears allow.

    Raises GraphError if the OMs are missing or were not compiled from the folder's graphs.
    """
    config = card.config
    names = {DECODER_OM: DECODER_FILE, **({PREFIX_OM: PREFIX_FILE} if num_prefix_layers(config) else {})}
    with ExitStack() as stack:
        opened: dict[str, OmDimsSession] = {}
        for name, source in names.items():
            hint = f"compile it: llama-adapter export om {folder / source} --sizes ... (docs/exported-decoder.md)"
            if not (folder / name).exists():
                raise GraphError(f"`{folder}` was exported for ATC, and has no `{name}`", hint=hint)
            session = stack.enter_context(closing(OmDimsSession(folder / name, device_id=device_id)))
            if any(card.files.get(file, mark) != mark for file, mark in session.sources.items()):
                raise GraphError(
                    f"`{folder / name}` was compiled from another export than the one in its folder", hint=hint
                )
            opened[name] = session
        step = OmStep(opened[DECODER_OM], config)
        prefix = OmPrefix(opened[PREFIX_OM]) if PREFIX_OM in opened else None
        program = HostProgram(card, prefill=step, increment=step, prefix=prefix, num_slots=num_slots, past=past)
        stack.pop_all()
    # A prompt is one step after the past. The tokens after a prompt attend to a cache.
    num_past = 0 if past is None else len(past)
    return program, min(config.context, num_past + step.most("S"), step.most("P") + 1)
