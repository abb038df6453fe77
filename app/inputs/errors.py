"""What is wrong with an input as a whole. What is wrong with one picture of it is told by that picture's item."""

from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError


class InputsError(LlamaAdapterError):
    """A list, manifest or sheet of questions that cannot be used at all."""

    exit_code = ExitCode.USAGE
    http_status = 400
