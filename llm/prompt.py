"""The instruction templates that the adapters were trained with."""

from llama_adapter.runtime.text import plain_text

_HEAD = "Below is an instruction that describes a task"
_TASK = "Write a response that appropriately completes the request."


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
