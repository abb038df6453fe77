"""The prompt templates of the adapters: instructions, and the conversations of LLaMA-Adapter V2's chat models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from llama_adapter.runtime.text import plain_text

# The prompt format of a model: "chat" is the model's own chat template, see `chat.py`.
Template = Literal["instruction", "conversation", "chat"]
Role = Literal["system", "user", "assistant"]
Turn = tuple[Role, str]

SEPARATOR: Final = "###"  # ends every turn; when the model writes it, the answer is complete
_NAMES: Final = {"user": "Human", "assistant": "Assistant"}
_SYSTEM: Final = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
# The published demo puts one example exchange before every chat. It is copied exactly from FastChat's first templates
# (lm-sys/FastChat, Apache License 2.0), including the line feed at its end.
_EXAMPLE: Final[tuple[Turn, Turn]] = (
    ("user", "What are the key differences between renewable and non-renewable energy sources?"),
    ("assistant", Path(__file__).with_name("conversation_example.txt").read_text(encoding="utf-8")),
)
_HEAD = "Below is an instruction that describes a task"
_TASK = "Write a response that appropriately completes the request."


def format_conversation(turns: Sequence[Turn]) -> str:
    """Format turns with the template `v1` of the published chat demo. The last turn is the user's.

    Texts of the role "system" replace the template's first sentences. The example exchange precedes the turns. Turns
    without text are omitted. The model continues directly after the last colon, without a space.
    """
    system = "\n".join(text for role, text in turns if role == "system" and text) or _SYSTEM
    said = [(role, text) for role, text in (*_EXAMPLE, *turns) if role != "system" and text]
    parts = [system, *(f"{_NAMES[role]}: {text}" for role, text in said), f"{_NAMES['assistant']}:"]
    return SEPARATOR.join(parts)


def format_prompt(instruction: str, input: str | None = None) -> str:
    """Insert an instruction, and optionally an input, into the training template.

    As in the reference, an empty string is an input too. Braces are plain text. The model continues after
    the last colon. A member of an enum that is a text stands for its value, not for its name.
    """
    if input is None:
        return f"{_HEAD}. {_TASK}\n\n### Instruction:\n{plain_text(instruction)}\n\n### Response:"
    return (
        f"{_HEAD}, paired with an input that provides further context. {_TASK}\n\n"
        f"### Instruction:\n{plain_text(instruction)}\n\n### Input:\n{plain_text(input)}\n\n### Response:"
    )
