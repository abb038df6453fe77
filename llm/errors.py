"""What can go wrong in the language half by a user's doing.

LlmError
  CheckpointError      weights or tokenizer that do not fit together, or not this model
  PromptTooLongError   a prompt (with its choices) that the context cannot hold
  PromptError          a prompt that is no sequence of the model's token ids
  DeviceError          a device or dtype that is not to be had here
"""


class LlmError(Exception):
    """Base of the errors of `llm`; `hint` says what to do next, or is empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(LlmError):
    """Weights or a tokenizer that do not fit together, or are not of this model."""


class PromptTooLongError(LlmError):
    """A prompt that does not fit into the context."""

    def __init__(self, num_tokens: int, context: int) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens, the context holds {context}",
            hint="shorten the prompt, or load the model with a larger --context",
        )
        self.num_tokens = num_tokens
        self.context = context


class PromptError(LlmError):
    """A prompt that the model cannot read: no tokens, or ids outside the vocabulary."""


class DeviceError(LlmError):
    """A device or a dtype that is not to be had here."""
