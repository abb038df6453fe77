"""Errors of training."""

from llama_adapter.runtime.errors import LlamaAdapterError


class TrainingError(LlamaAdapterError):
    """A run that cannot go on: losses that are not finite, or a full disk."""
