"""`convert --tensor-parallel`: writes bundles whose decoder is split over ranks, with one file for each rank."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from llama_adapter.app.models.bundle import check_target, known_answer_of, save_bundle
from llama_adapter.app.models.checkpoints import Origin
from llama_adapter.app.models.lora_bundle import stream_merged_bundle
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint


def split_bundle(
    bundle: str | os.PathLike[str] | None,
    directory: str | os.PathLike[str],
    *,
    num_ranks: int,
    lora: Sequence[str] = (),
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a bundle in its own precision with the decoder split over `num_ranks`; returns the new folder.

    `bundle` None means the embedded model. Packed weights are unpacked. `lora` are PEFT folders to merge, each FOLDER
    or FOLDER=WEIGHT. Without them, the bundle keeps the known answer of the original. `tell` gets a line for each
    note about the model. Raises CheckpointError for a bundle that is damaged, and the errors of `save_bundle`.
    """
    source, target = Path(bundle_folder(bundle)), Path(directory)
    if target.resolve() == source.resolve():
        raise CheckpointError(f"`{target}` is the bundle to read itself", hint="write to another place")
    check_target(target, overwrite=overwrite)
    model, tensors = stream_merged_bundle(source, lora)
    for note in model.notes:
        tell(f"note: {note}")
    origin = model.origin or Origin(digest=model.digest, fingerprint=fingerprint(model.vision_state))
    return save_bundle(
        target,
        model=dataclasses.replace(model, origin=origin),
        decoder_tensors=tensors,
        num_ranks=num_ranks,
        **({} if lora else known_answer_of(source)),
        overwrite=overwrite,
    )
