"""Reads the questions that a model stores, without its weights."""

from pathlib import Path

from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import StoredQuestions, declared_questions
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.weights.adapter import open_adapter


def stored_questions(spec: CaptionerSpec) -> StoredQuestions:
    """The questions that the model of a spec stores. Raises CheckpointError and GraphError.

    An exported decoder stores a prompt for captions only.
    """
    if spec.decoder is not None:
        return StoredQuestions(prompt=read_card(Path(spec.decoder)).prompt)
    if spec.llama_dir is None:
        manifest = read_manifest(bundle_folder(spec.model))
        return StoredQuestions(prompt=manifest["prompt"], question=manifest.get("question"))
    if spec.adapter is None:
        return StoredQuestions()
    return declared_questions(open_adapter(spec.adapter, for_texts=True))
