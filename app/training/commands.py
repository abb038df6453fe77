"""Commands for what a run leaves, as people type them: ask the model, score it, calibrate it."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from llama_adapter.app.training.job import TrainJob
from llama_adapter.app.training.part_tables import table_name
from llama_adapter.app.training.prepare import TEST, TRAIN, VALIDATION, TrainingData


def ask_command(job: TrainJob, data: TrainingData, *, folder: Path, bundle: Path | None) -> str:
    """A command that asks the trained model about a picture, or answers a text."""
    model = _model(job, bundle)
    example = next((one.example for one in data.train if one.has_picture), None)
    if example is None:
        return f'llama-adapter generate --prompt "TEXT" {model}'
    if example.question.instruction is None:
        return f"llama-adapter caption PICTURE {model}"
    if any("," in choice for choice in example.choices or ()):  # --choices separates at commas, tables do not
        return f"llama-adapter ask --manifest {_quoted(folder / table_name(TRAIN))} {model}"
    choices = "" if example.choices is None else f" --choices {shlex.quote(','.join(example.choices))}"
    return f"llama-adapter ask PICTURE {model} --question {shlex.quote(example.question.instruction)}{choices}"


def check_commands(job: TrainJob, data: TrainingData, *, folder: Path, bundle: Path | None) -> Iterator[str]:
    """Commands that score the test examples, and that calibrate choices by the validation examples."""
    model = _model(job, bundle)
    is_asked = job.question is not None and any(one.example.task == "caption" for one in data.test)
    question = f" --question {shlex.quote(job.question or '')}" if is_asked else ""
    if data.test:
        out = _quoted(folder / "scores")
        yield f"llama-adapter eval {_quoted(folder / table_name(TEST))} {model}{question} --out {out}"
    choices = {one.example.choices for one in data.validation}
    common = choices.pop() if len(choices) == 1 else None
    if common is None or any("," in name for name in common) or not all(one.has_picture for one in data.validation):
        return
    yield (
        f"llama-adapter ask --calibrate {_quoted(folder / table_name(VALIDATION))} {model} "
        f"--choices {shlex.quote(','.join(common))} --calibration-out {_quoted(folder / 'calibration.json')}"
    )


def _model(job: TrainJob, bundle: Path | None) -> str:
    """The flags that name the model."""
    if bundle is not None:
        return f"--model {_quoted(bundle)}"
    spec, clip = job.spec, job.spec.clip or job.choice.clip
    given = (("llama-dir", spec.llama_dir), ("llama-type", spec.llama_type), ("adapter", job.out), ("clip", clip))
    return " ".join(f"--{name} {_quoted(value)}" for name, value in given if value)


def _quoted(value: Path | str) -> str:
    return shlex.quote(str(value))
