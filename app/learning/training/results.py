"""The results of a run: the adapter's file, a bundle, test scores, curves, and the model card with its commands."""

import dataclasses
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.jobs.report import commit, versions
from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.learning.scores.report import as_json, as_markdown, rendered
from llama_adapter.app.learning.scores.scoring import Scores, score
from llama_adapter.app.learning.training.asking import caption_prompts
from llama_adapter.app.learning.training.checkpoint import LoopState, TrainingError, other_run
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.loop import Ended
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.part_tables import write_tables
from llama_adapter.app.learning.training.prepare import TEST, TRAIN, VALIDATION, TrainingData, Unreadable
from llama_adapter.app.learning.training.run_log import LOG, draw_curves, read_log
from llama_adapter.app.learning.training.scoring import answered
from llama_adapter.app.learning.training.yardstick import Yardstick
from llama_adapter.app.models.bundle import check_target, save_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import QUESTION_KEYS, TEMPLATE_KEY
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.llm.weights.adapter import check_fits, open_adapter
from llama_adapter.runtime.atomic_write import atomic_write, write_text
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.json_object import read_object
from llama_adapter.runtime.settings.shown import format_settings
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_name
from llama_adapter.vision.out_of_distribution import OodDetector

CARD, CURVES, BUNDLE, DATA, SETTINGS = "card.md", "curves.png", "bundle", "data.json", "settings.yaml"
_V1 = re.compile(r"adapter_query\.weight|layers\.\d+\.attention\.gate")
_MOST_ANSWERS: Final = 20  # rows in the card's table of answers
_ENDS: Final = {"": "all steps", "early": "early, because the validation score did not improve"}


def write_beginning(job: TrainJob, data: TrainingData, *, run: str) -> None:
    """Write the settings, the digests of the data, and a table for each part of the data. Raises OSError.

    `run` is the `run_digest` computed before pictures were decoded.
    """
    write_text(job.folder / SETTINGS, format_settings(job.settings))
    write_text(job.folder / DATA, json.dumps({"run": run, **data.to_dict()}, indent=1) + "\n")
    write_tables(data, job.folder)


def require_same_run(folder: Path, run: str) -> None:
    """Raise UsageError if the run in a folder began with another digest.

    If the folder does not say, nothing is raised: the digest in the checkpoint is checked later.
    """
    if _data_of(folder).get("run", run) != run:
        raise other_run(folder)


def num_known(job: TrainJob, model: TrainableModel, data: TrainingData) -> int:
    """How many test pictures the model was trained or validated on before, if the run that made it is beside it."""
    bundle = Path(model.sources.bundle or "")
    folder = Path(job.spec.adapter).with_suffix(".training") if job.spec.adapter else bundle.parent
    parts = _data_of(folder).get("parts", {}) if folder.suffix == ".training" else {}
    known = {digest for name, part in parts.items() if name != TEST for digest in part["pictures"]}
    return len(known & {one.example.digest for one in data.test})


def _data_of(folder: Path) -> dict[str, Any]:
    """The content of `data.json` in the folder of a run; empty if it cannot be read."""
    try:
        return read_object((folder / DATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def require_same_measure(job: TrainJob, state: LoopState, *, is_scored: bool) -> None:
    """Raise UsageError if the evaluations of a resumed run are compared by another measure than its next ones."""
    if not state.best or len(state.best) == 1 + is_scored:  # see `Validation.key`
        return
    names = ("loss", "answers")
    began, now = names[not is_scored], names[is_scored]
    raise UsageError(
        f"The run in `{shown_name(str(job.folder))}` compares its evaluations by {began}, and would go on by {now}",
        hint=f"resume with --score {began}, or start again with --force",
    )


def require_target(job: TrainJob, model: TrainableModel) -> None:
    """Raise CheckpointError if the run cannot replace what is in the place of its bundle."""
    if _bundle_dtype(job, model) is not None:
        check_target(job.folder / BUNDLE, overwrite=True)


def write_model(job: TrainJob, model: TrainableModel, *, detector: OodDetector | None) -> Path | None:
    """Write the adapter's file, and a bundle if the job wants one; returns the bundle's folder. Raises OSError.

    The bundle gets `detector`, which marks pictures unlike those of the training.
    """
    write_adapter(model, job.out)
    if (dtype := _bundle_dtype(job, model)) is None:
        return None
    loaded, tensors = model.loaded_model(dtype)
    loaded = dataclasses.replace(loaded, name=Path(job.out).stem, ood_detector=detector)
    save_bundle(job.folder / BUNDLE, model=loaded, decoder_tensors=tensors, overwrite=True)
    return job.folder / BUNDLE


def _bundle_dtype(job: TrainJob, model: TrainableModel) -> torch.dtype | None:
    """The dtype of the bundle that a run writes; None if it writes none."""
    base = model.sources.bundle
    if (base is None and not job.bundle) or model.vision is None:
        return None
    return model.dtype if base is None else DTYPES[read_manifest(Path(base))["dtype"]]


def trained_spec(job: TrainJob, model: TrainableModel) -> CaptionerSpec:
    """The spec of the written adapter with the model that it was trained on."""
    sources, spec = model.sources, job.spec
    changes: dict[str, Any] = {"clip": spec.clip or job.choice.clip}
    if sources.bundle is not None:
        changes |= {"model": None, "llama_dir": sources.bundle, "llama_type": None}
    return dataclasses.replace(spec, adapter=job.out, context=model.decoder_config.context, **changes)


def score_test(job: TrainJob, spec: CaptionerSpec, data: TrainingData) -> list[Scores]:
    """Score the written adapter, and write `test.json` and `test.md`. Raises the errors of `Captioner` and OSError."""
    with Captioner.from_spec(spec) as captioner:
        outcomes = answered(captioner, data.test)
    found = [score(of_task, model=Path(job.out).stem, task=task) for task, of_task in outcomes.items()]
    for one in found:
        kind = "" if len(found) == 1 else f"-{one.task}"
        for suffix, text in ((".json", as_json(one)), (".md", as_markdown(one))):
            write_text(job.folder / f"test{kind}{suffix}", text)
    return found


def draw(job: TrainJob) -> None:
    """Draw `curves.png`; without matplotlib, or if another program has damaged the log, there is a note instead."""
    try:
        rows = read_log(job.folder / LOG)
    except TrainingError as error:
        say(f"note: the curves are not drawn: {error.message}")
        return
    if not draw_curves(rows, job.folder / CURVES, title=Path(job.out).stem):
        say(f"note: `{CURVES}` is not drawn, because matplotlib is not installed. Install it:\n{install_hint('train')}")


def write_card(
    job: TrainJob,
    model: TrainableModel,
    data: TrainingData,
    *,
    ended: Ended,
    unreadable: Sequence[Unreadable],
    scores: Sequence[Scores],
    unscored: str,
    memory: str,
    yardstick: Yardstick | None,
    verdict: str | None,
    bundle: Path | None,
) -> None:
    """Write `card.md`: base model, data, settings and scores. `unscored` is the reason if there are no scores."""
    counts = model.counts()
    trained = ", ".join(f"{count:,} in {kind}" for kind, count in counts.items())
    text = rendered(
        Path(__file__).with_name("templates") / "card.md",
        job=job,
        model=model,
        data=data,
        state=ended.state,
        end=_ENDS.get(ended.why, ended.why),
        stem=lambda path: Path(path).stem,
        commands=[make(job, data, bundle=bundle) for make in (ask_command, score_command, calibrate_command)],
        answers=_answers(data),
        trained=f"{sum(counts.values()):,}: {trained}",
        unreadable=unreadable,
        memory=memory,
        versions=versions() | {"commit": commit()},
        yardstick=yardstick,
        verdict=verdict,
        reports=[_nested(as_markdown(one)) for one in scores],
        unscored=unscored,
    )
    write_text(job.folder / CARD, f"{text}\n")


def _answers(data: TrainingData) -> list[tuple[str, list[int]]]:
    """The right answers with their numbers in each part; none if most examples are captions, or answers are many."""
    parts = [Counter(one.example.answers[0] for one in part) for _, part in data.parts]
    [(task, _)] = Counter(one.example.task for one in data.everything).most_common(1)
    if task == "caption" or len(parts[0]) > _MOST_ANSWERS:
        return []
    return [(answer, [part[answer] for part in parts]) for answer in sorted(parts[0])]


def _nested(markdown: str) -> str:
    """The Markdown with all headings two levels lower."""
    return "\n".join(f"##{line}" if line.startswith("#") else line for line in markdown.splitlines())


def write_adapter(model: TrainableModel, path: str | os.PathLike[str]) -> None:
    """Write {"model": tensors, "config": ...} as `torch.save` does.

    An adapter of queries and gates for texts is written as those of LLaMA-Adapter V1 are, with the tensors at the top.
    Its programs look for them there, and ignore a `config` beside them, which has the question, if one was learned,
    and the template.

    The new file is read back with the usual loader before it replaces the file at `path`. Raises CheckpointError if
    this fails, and OSError.
    """
    with atomic_write(path) as file:
        torch.save(_content(model), file)
        file.flush()
        written = open_adapter(file.name, for_texts=model.vision is None)
        check_fits(written, model.decoder_config, llama=model.sources.llama.name)


def _content(model: TrainableModel) -> dict[str, Any]:
    tensors, config = model.adapter_tensors(), model.file_config()
    is_v1 = model.vision is None and all(map(_V1.fullmatch, tensors))
    if not is_v1:
        return {"model": tensors, "config": config}
    kept = (QUESTION_KEYS["question"], TEMPLATE_KEY)  # texts have no caption prompt
    asked = {key: config[key] for key in kept if key in config}
    return {**tensors, **({"config": asked} if asked else {})}


def ask_command(job: TrainJob, data: TrainingData, *, bundle: Path | None) -> str:
    """A command that asks the trained model about a picture of the data, or an instruction without a picture."""
    model = _model(job, bundle)
    example = next((one.example for one in data.train if one.has_picture), None)
    if example is None:
        return f'llama-adapter generate --prompt "TEXT" {model}'
    if example.question.instruction is None:
        return f"llama-adapter caption PICTURE {model}"
    if _needs_table(example):
        return f"llama-adapter ask {_flag('manifest', job.folder / f'{TRAIN}.jsonl')} {model}"
    choices = "" if example.choices is None else " " + _choices_flag(example.choices)
    return f"llama-adapter ask PICTURE {model} {_flag('question', example.question.instruction)}{choices}"


def score_command(job: TrainJob, data: TrainingData, *, bundle: Path | None) -> str | None:
    """A command that scores the test examples; None if there are none."""
    if not data.test:
        return None
    every, learned = caption_prompts(data.everything), caption_prompts(data.train)
    is_asked = job.question is not None and (len(every) > 1 or every != learned)  # else the model stores it
    question = f" {_flag('question', job.question or '')}" if is_asked else ""
    is_mixed = len({one.example.choices is None for one in data.test}) > 1  # `eval` takes choices for all or none
    table, out = _quoted(job.folder / f"{TEST}.jsonl"), _flag("out", job.folder / "scores")
    return f"llama-adapter eval {table} {_model(job, bundle)}{question}{' --task open' * is_mixed} {out}"


def calibrate_command(job: TrainJob, data: TrainingData, *, bundle: Path | None) -> str | None:
    """A command that calibrates choices on the validation examples; None unless all have the same choices."""
    choices = {one.example.choices for one in data.validation}
    common = choices.pop() if len(choices) == 1 else None
    if common is None or not all(one.has_picture for one in data.validation):
        return None
    table, out = job.folder / f"{VALIDATION}.jsonl", job.folder / "calibration.json"
    return (
        f"llama-adapter ask {_flag('calibrate', table)} {_model(job, bundle)} "
        f"{_choices_flag(common)} {_flag('calibration-out', out)}"
    )


def _needs_table(example: Example) -> bool:
    """Whether the example has an input or a question with variables, so that only a row of a table can ask it."""
    asked, question = question_of(example, question=None), example.question
    return question.input is not None or as_template(asked.instruction or "") != question.instruction


def _model(job: TrainJob, bundle: Path | None) -> str:
    """The flags that name the model."""
    if bundle is not None:
        return _flag("model", bundle)
    spec, clip = job.spec, job.spec.clip or job.choice.clip
    given = (("llama-dir", spec.llama_dir), ("llama-type", spec.llama_type), ("adapter", job.out), ("clip", clip))
    return " ".join(_flag(name, value) for name, value in given if value)


def _choices_flag(choices: Sequence[str]) -> str:
    """The flag with these choices: with commas between them, or as a JSON list if this would be read otherwise."""
    needs_list = any("," in choice for choice in choices) or choices[0].lstrip().startswith("[")
    return _flag("choices", json.dumps(choices, ensure_ascii=False) if needs_list else ",".join(choices))


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
