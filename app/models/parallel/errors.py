"""The error of ranks that cannot continue. Imports no torch."""

from llama_adapter.runtime.errors import LlamaAdapterError


class RankError(LlamaAdapterError):
    """A rank has ended, hangs, did not join, or differs from the others. All ranks end with this error."""

    http_status = 503
