"""How similar the rows of the language model's head are for different answers. No training changes the head."""

from collections.abc import Sequence
from pathlib import Path

import torch

from llama_adapter.app.models.bundle import load_bundle

_BEFORE = "### Response:"  # the text before an answer in the prompt


def head_likeness(bundle: Path, answers: Sequence[str]) -> float:
    """Mean cosine between the head's rows for the first tokens of two different answers."""
    model = load_bundle(bundle)
    tokens = [model.tokenizer.encode_continuation(_BEFORE, answer)[0] for answer in answers]
    rows_AD = torch.nn.functional.normalize(model.decoder_state["head.weight"][tokens].float(), dim=1)
    cosine_AA = rows_AD @ rows_AD.T
    count = len(answers)
    return float((cosine_AA.sum() - count) / (count * (count - 1)))
