"""The instruction templates the adapters were trained with. Text in, text out; no tokens here."""

_HEAD = "Below is an instruction that describes a task"
_TASK = "Write a response that appropriately completes the request."


def format_prompt(instruction: str, input: str | None = None) -> str:
    """Put an instruction, and an input if one is given, into the template of the adapters' training.

    Only `None` means "no input": an empty string is an input, as in the reference. Braces in either text are
    plain text. Nothing follows the last colon; the model continues there.
    """
    if input is None:
        return f"{_HEAD}. {_TASK}\n\n### Instruction:\n{instruction}\n\n### Response:"
    return (
        f"{_HEAD}, paired with an input that provides further context. {_TASK}\n\n"
        f"### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    )
