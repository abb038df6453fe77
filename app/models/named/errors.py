"""Errors of models that are found by name."""

from llama_adapter.runtime.errors import LlamaAdapterError, UsageError


class NotHereError(UsageError):
    """Weights that are not on this machine, and that nobody allowed to fetch."""


class DownloadError(LlamaAdapterError):
    """Weights that could not be fetched, or are not what their authors published."""

    default_hint = "check the network, and run the command again: it goes on where it ended"
