"""Sizes of decoders and encoders by name, and numbers of tokens."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Part = Literal["decode", "prefill", "job", "vision", "ceiling"]

# As named in app/models/random_model.py; `vit-tiny` is the encoder of its tiny decoder.
DECODERS = (
    *("tiny", "160M", "1B", "7B"),
    *("SmolLM2-135M", "SmolLM2-360M", "Qwen2.5-0.5B", "TinyLlama", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B"),
)
ENCODERS = ("vit-tiny", "ViT-L/14", "ViT-B/32", "ViT-L/14@336", "SigLIP-base")
# Encoders of caption jobs, by decoder.
JOB_ENCODERS: Mapping[str, tuple[str, ...]] = {
    "tiny": ("vit-tiny",),
    "160M": ("embedded", "ViT-L/14"),
    "1B": ("embedded", "ViT-L/14", "ViT-B/32"),
    "7B": ("ViT-L/14",),
}

NUM_PROMPT_TOKENS = 55
NUM_STEPS = 32
_SLOWER = ("1B", "7B", "TinyLlama", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")  # so fewer steps on a CPU
_FEWER_STEPS = 12
CONTEXT = 128  # positions per row

SMALL_JOB = 64  # pictures; larger jobs are for engines with a number of slots, see `table.Engine`

# The caption lengths of a job's pictures, in tokens; longer jobs repeat them.
JOB_ENDS = (12, 25, 38, 51, 64)


def job_ends(num_pictures: int) -> tuple[int, ...]:
    """The caption length of each picture of a job."""
    return tuple(itertools.islice(itertools.cycle(JOB_ENDS), num_pictures))


def num_steps(size: str, *, device: str) -> int:
    """The number of decode steps of a measurement."""
    return _FEWER_STEPS if device == "cpu" and size in _SLOWER else NUM_STEPS


def prompt_ids(row: int, *, length: int = NUM_PROMPT_TOKENS) -> list[int]:
    """The prompt of a row: the begin token, and ids that differ between rows."""
    return [1, *(3 + (7919 * (row + 1) * (place + 1)) % 31000 for place in range(length - 1))]


def place_of(file: str, *, work: Path, size: str) -> Path:
    """The path of a size's file."""
    return work / size.replace("/", "-") / file
