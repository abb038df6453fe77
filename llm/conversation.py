"""The conversation template of LLaMA-Adapter V2's chat models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

# The prompt format of a model: "instruction" is in `prompt.py`, "chat" the model's own chat template, see `chat.py`.
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


def format_conversation(turns: Sequence[Turn]) -> str:
    """Format turns with the template `v1` of the published chat demo. The last turn is the user's.

    Texts of the role "system" replace the template's first sentences. The example exchange precedes the turns. Turns
    without text are omitted. The model continues directly after the last colon, without a space.
    """
    system = "\n".join(text for role, text in turns if role == "system" and text) or _SYSTEM
    said = [(role, text) for role, text in (*_EXAMPLE, *turns) if role != "system" and text]
    parts = [system, *(f"{_NAMES[role]}: {text}" for role, text in said), f"{_NAMES['assistant']}:"]
    return SEPARATOR.join(parts)
