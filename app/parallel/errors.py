"""The error of ranks that cannot go on. Imports no torch."""

from llama_adapter.runtime.errors import LlamaAdapterError


class RankError(LlamaAdapterError):
    """A rank that ended, hangs, was not met, or does not fit the others. All of them end with it."""

    http_status = 503
