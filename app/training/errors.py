"""Errors of training."""

from pathlib import Path

from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.text import shown_name


class TrainingError(LlamaAdapterError):
    """A run that cannot go on: losses that are not finite, or a full disk."""


def other_run(folder: Path) -> UsageError:
    """The error of `--resume` in the folder of a run of something else."""
    return UsageError(
        f"The run in `{shown_name(str(folder))}` has other data, examples or settings",
        hint="go on with what it began with, or start again with --force",
    )
