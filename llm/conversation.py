"""The conversation template of LLaMA-Adapter V2's chat models."""

from collections.abc import Sequence
from typing import Final, Literal

Template = Literal["instruction", "conversation"]  # the prompt format of a model; "instruction" is in `prompt.py`
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
    (
        "assistant",
        "Renewable energy sources are those that can be replenished naturally in a relatively short amount of time, "
        "such as solar, wind, hydro, geothermal, and biomass. Non-renewable energy sources, on the other hand, are "
        "finite and will eventually be depleted, such as coal, oil, and natural gas. Here are some key differences "
        "between renewable and non-renewable energy sources:\n"
        "1. Availability: Renewable energy sources are virtually inexhaustible, while non-renewable energy sources are "
        "finite and will eventually run out.\n"
        "2. Environmental impact: Renewable energy sources have a much lower environmental impact than non-renewable "
        "sources, which can lead to air and water pollution, greenhouse gas emissions, and other negative effects.\n"
        "3. Cost: Renewable energy sources can be more expensive to initially set up, but they typically have lower "
        "operational costs than non-renewable sources.\n"
        "4. Reliability: Renewable energy sources are often more reliable and can be used in more remote locations "
        "than non-renewable sources.\n"
        "5. Flexibility: Renewable energy sources are often more flexible and can be adapted to different situations "
        "and needs, while non-renewable sources are more rigid and inflexible.\n"
        "6. Sustainability: Renewable energy sources are more sustainable over the long term, while non-renewable "
        "sources are not, and their depletion can lead to economic and social instability.\n",
    ),
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
