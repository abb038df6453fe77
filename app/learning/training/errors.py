"""Errors of training."""

from pathlib import Path

from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.text import shown_name


class TrainingError(LlamaAdapterError):
    """A run cannot continue: losses are not finite, the disk is full, or a file of it is damaged."""


def other_run(folder: Path) -> UsageError:
    """The error if `--resume` finds a run with other settings or data in the folder."""
    return UsageError(
        f"The run in `{shown_name(str(folder))}` has other data, examples or settings",
        hint="resume with the same data and settings, or start again with --force",
    )
