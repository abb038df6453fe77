"""Shell commands for the results of a run, shown to the user: ask the model, score it, calibrate it."""

import re
import shlex
from pathlib import Path

from llama_adapter.app.learning.evaluating.question import question_of
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.training.asking import caption_prompts
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.part_tables import table_name
from llama_adapter.app.learning.training.prepare import TEST, TRAIN, VALIDATION, TrainingData
from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS


def ask_command(job: TrainJob, data: TrainingData, *, folder: Path, bundle: Path | None) -> str:
    """A command that asks the trained model about a picture of the data, or an instruction without a picture."""
    model = _model(job, bundle)
    example = next((one.example for one in data.train if one.has_picture), None)
    if example is None:
        return f'llama-adapter generate --prompt "TEXT" {model}'
    if example.question.instruction is None:
        return f"llama-adapter caption PICTURE {model}"
    if _needs_table(example):
        return f"llama-adapter ask {_flag('manifest', folder / table_name(TRAIN))} {model}"
    choices = "" if example.choices is None else " " + _flag("choices", ",".join(example.choices))
    return f"llama-adapter ask PICTURE {model} {_flag('question', example.question.instruction)}{choices}"


def score_command(job: TrainJob, data: TrainingData, *, folder: Path, bundle: Path | None) -> str | None:
    """A command that scores the test examples; None if there are none."""
    if not data.test:
        return None
    every, learned = caption_prompts(data.everything), caption_prompts(data.train)
    is_asked = job.question is not None and (len(every) > 1 or every != learned)  # else the model stores it
    question = f" {_flag('question', job.question or '')}" if is_asked else ""
    table, out = _quoted(folder / table_name(TEST)), _flag("out", folder / "scores")
    return f"llama-adapter eval {table} {_model(job, bundle)}{question} {out}"


def calibrate_command(job: TrainJob, data: TrainingData, *, folder: Path, bundle: Path | None) -> str | None:
    """A command that calibrates choices on the validation examples; None unless all have the same choices."""
    choices = {one.example.choices for one in data.validation}
    common = choices.pop() if len(choices) == 1 else None
    if common is None or any("," in name for name in common) or not all(one.has_picture for one in data.validation):
        return None
    table, out = folder / table_name(VALIDATION), folder / "calibration.json"
    return (
        f"llama-adapter ask {_flag('calibrate', table)} {_model(job, bundle)} "
        f"{_flag('choices', ','.join(common))} {_flag('calibration-out', out)}"
    )


def _needs_table(example: Example) -> bool:
    """Whether the example can only be asked as a row of a table, not with flags.

    Flags cannot give an input or a question with variables, and --choices splits its value at commas.
    """
    asked, question = question_of(example, question=None), example.question
    is_fixed = question.input is None and as_template(asked.instruction or "") == question.instruction
    return not is_fixed or any("," in choice for choice in example.choices or ())


def _model(job: TrainJob, bundle: Path | None) -> str:
    """The flags that name the model."""
    if bundle is not None:
        return _flag("model", bundle)
    spec, clip = job.spec, job.spec.clip or job.choice.clip
    given = (("llama-dir", spec.llama_dir), ("llama-type", spec.llama_type), ("adapter", job.out), ("clip", clip))
    return " ".join(_flag(name, value) for name, value in given if value)


def _flag(name: str, value: Path | str) -> str:
    joint = "=" if str(value).startswith("-") else " "  # otherwise it is parsed as a flag
    return f"--{name}{joint}{_quoted(value)}"


def _quoted(value: Path | str) -> str:
    text = str(value)
    if not UNSAFE_ON_TERMINALS.search(text):
        return shlex.quote(text)
    literal = UNSAFE_ON_TERMINALS.sub(_escape, text.replace("\\", r"\\").replace("'", r"\'"))
    return f"$'{literal}'"


def _escape(unsafe: re.Match[str]) -> str:
    """A character of `UNSAFE_ON_TERMINALS` in a string `$'...'` of the shell."""
    code = ord(unsafe[0])
    is_byte = code < 0x80 or 0xDC80 <= code < 0xDD00  # a name's byte that is not UTF-8 is a surrogate
    return f"\\x{code & 0xFF:02x}" if is_byte else f"\\u{code:04x}"
