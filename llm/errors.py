"""Errors about prompts."""

from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError


class PromptError(LlamaAdapterError):
    """A prompt without tokens, or with token ids outside the vocabulary."""

    exit_code = ExitCode.USAGE
    http_status = 400


class GrammarError(PromptError):
    """A JSON schema or regular expression that answers cannot follow. The message quotes no text of it."""


class PromptTooLongError(PromptError):
    """A prompt that, with its continuations, does not fit into the context."""

    def __init__(self, num_tokens: int, context: int) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens, the context holds {context}",
            hint="shorten the prompt, or load the model with a larger --context",
        )
        self.num_tokens = num_tokens
        self.context = context
