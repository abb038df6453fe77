"""The results of a run: the adapter's file, a bundle, scores of the test examples, curves and the model card."""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.learning.scores.report import as_json, as_markdown
from llama_adapter.app.learning.scores.scoring import Scores
from llama_adapter.app.learning.training.adapter_file import write_adapter
from llama_adapter.app.learning.training.cache import Unreadable
from llama_adapter.app.learning.training.checkpoint import BEST, LAST, LoopState
from llama_adapter.app.learning.training.commands import ask_command, calibrate_command, score_command
from llama_adapter.app.learning.training.curves import draw_curves
from llama_adapter.app.learning.training.errors import TrainingError, other_run
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.part_tables import table_name, write_tables
from llama_adapter.app.learning.training.plan import MOMENTS
from llama_adapter.app.learning.training.prepare import TEST, TrainingData
from llama_adapter.app.learning.training.run_log import LOG, read_log
from llama_adapter.app.learning.training.scoring import all_scores, answered
from llama_adapter.app.models.bundle import check_target, save_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.json_object import read_object
from llama_adapter.runtime.settings.shown import format_settings
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import markdown_text, shown_excerpt, shown_name

CARD, CURVES, BUNDLE, DATA, SETTINGS = "card.md", "curves.png", "bundle", "data.json", "settings.yaml"
_MOST_ANSWERS: Final = 20  # rows in the card's table of answers
_COMMANDS: Final = (ask_command, score_command, calibrate_command)
_ENDS: Final = {"": "all steps", "early": "early, because the validation score did not improve"}


def write_beginning(job: TrainJob, data: TrainingData, folder: Path, *, run: str) -> None:
    """Write the settings, the digests of the data, and a table for each part of the data. Raises OSError.

    `run` is the `run_digest` computed before pictures were decoded.
    """
    for name, text in (
        (SETTINGS, format_settings(job.settings)),
        (DATA, json.dumps({"run": run, **data.to_dict()}, indent=1) + "\n"),
    ):
        with atomic_write(folder / name) as file:
            file.write(text.encode(errors="backslashreplace"))
    write_tables(data, folder)


def require_same_run(folder: Path, run: str) -> None:
    """Raise UsageError if the run in a folder began with another digest.

    If the folder does not say, nothing is raised: the digest in the checkpoint is checked later.
    """
    try:
        began = read_object((folder / DATA).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError):
        return
    if began != run:
        raise other_run(folder)


def require_same_measure(state: LoopState, *, is_scored: bool, folder: Path) -> None:
    """Raise UsageError if the evaluations of a resumed run are compared by another measure than its next ones."""
    if not state.best or len(state.best) == 1 + is_scored:  # see `Validation.key`
        return
    names = ("loss", "answers")
    began, now = names[not is_scored], names[is_scored]
    raise UsageError(
        f"The run in `{shown_name(str(folder))}` compares its evaluations by {began}, and would go on by {now}",
        hint=f"resume with --score {began}, or start again with --force",
    )


def require_disk(job: TrainJob, model: TrainableModel, folder: Path) -> None:
    """Raise TrainingError unless the disk has room for the files that a run writes.

    They are written one after another. The old file is deleted only after the new one is complete. Raises
    CheckpointError if the run cannot replace what is in the place of its bundle.
    """
    weights = sum(one.nbytes for one in model.trained().values())
    adapter = sum(tensor.nbytes for tensor in model.adapter_tensors().values())
    checkpoints = [(folder / LAST, (1 + MOMENTS) * weights), (folder / BEST, weights)]
    writes = [*checkpoints, *checkpoints, (Path(job.out), adapter)]
    if (dtype := _bundle_dtype(job, model)) is not None:
        check_target(folder / BUNDLE, overwrite=True)
        writes.append((folder / BUNDLE, _bundle_bytes(model, dtype)))
    there = {path: _size(path) for path, _ in writes}
    needed = added = 0
    for path, size in writes:
        needed = max(needed, added + size)
        added, there[path] = added + size - there[path], size
    free = shutil.disk_usage(folder.absolute().parent).free
    if needed > free:
        raise TrainingError(
            f"The run needs up to {needed / 1e6:,.0f} MB, and the disk of `{shown_name(str(folder))}` has "
            f"{free / 1e6:,.0f} MB free",
            hint="make room, or name another --out",
        )


def _size(place: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 if there is none."""
    paths = place.rglob("*") if place.is_dir() else [place]
    return sum(path.stat().st_size for path in paths if path.is_file())


def write_model(job: TrainJob, model: TrainableModel, folder: Path) -> Path | None:
    """Write the adapter's file, and a bundle if the job wants one; returns the bundle's folder. Raises OSError."""
    write_adapter(model, job.out)
    if (dtype := _bundle_dtype(job, model)) is None:
        return None
    loaded, tensors = model.loaded_model(dtype)
    loaded = dataclasses.replace(loaded, name=Path(job.out).stem)
    save_bundle(folder / BUNDLE, model=loaded, decoder_tensors=tensors, overwrite=True)
    return folder / BUNDLE


def _bundle_dtype(job: TrainJob, model: TrainableModel) -> torch.dtype | None:
    """The dtype of the bundle that a run writes; None if it writes none."""
    base = model.sources.bundle
    if (base is None and not job.bundle) or model.vision is None:
        return None
    return model.dtype if base is None else DTYPES[read_manifest(Path(base))["dtype"]]


def _bundle_bytes(model: TrainableModel, dtype: torch.dtype) -> int:
    has_lora = "LoRA factors" in model.choice.kinds or model.sources.adapter.has_lora
    decoder = dataclasses.replace(model.decoder_config, separate_adapter_kv=has_lora)
    halves = (expected_forms(config, dtype=dtype) for config in (decoder, model.vision_config))
    return sum(form.num_bytes for forms in halves for form in forms.values()) + len(model.tokenizer.data)


def trained_spec(job: TrainJob, model: TrainableModel) -> CaptionerSpec:
    """The spec of the written adapter with the model that it was trained on."""
    sources, spec = model.sources, job.spec
    if sources.bundle is not None:
        changes: dict[str, Any] = {"model": None, "llama_dir": sources.bundle, "llama_type": None}
    else:
        changes = {"clip": spec.clip or job.choice.clip}
    return dataclasses.replace(spec, adapter=job.out, context=model.decoder_config.context, **changes)


def score_test(job: TrainJob, spec: CaptionerSpec, data: TrainingData, folder: Path) -> list[Scores]:
    """Score the written adapter on the test examples, and write `test.json` and `test.md`.

    Raises the errors of `Captioner` and OSError.
    """
    if not data.test:
        return []
    with Captioner.from_spec(spec) as captioner:
        found = all_scores(answered(captioner, data.test), model=Path(job.out).stem)
    for one in found:
        kind = "" if len(found) == 1 else f"-{one.task}"
        for suffix, text in ((".json", as_json(one)), (".md", as_markdown(one))):
            with atomic_write(folder / f"test{kind}{suffix}") as file:
                file.write(text.encode(errors="backslashreplace"))
    return found


def draw(job: TrainJob, folder: Path) -> bool:
    """Draw `curves.png`; returns False without matplotlib, and if another program has damaged the log."""
    try:
        rows = read_log(folder / LOG)
    except TrainingError as error:
        say(f"note: the curves are not drawn: {error.message}")
        return False
    return draw_curves(rows, folder / CURVES, title=Path(job.out).stem)


def write_card(
    job: TrainJob,
    model: TrainableModel,
    data: TrainingData,
    folder: Path,
    *,
    state: LoopState,
    why: str,
    unreadable: Sequence[Unreadable],
    scores: Sequence[Scores],
    unscored: str,
    memory: str,
    bundle: Path | None,
) -> None:
    """Write `card.md`: the base model, the data, the settings and the scores of the adapter.

    `unscored` is the reason if there are no scores.
    """
    optimisation = job.optimisation
    lines = [
        f"# {markdown_text(shown_name(Path(job.out).stem))}",
        "",
        f"An adapter for {markdown_text(shown_name(model.sources.name))}, trained with `llama-adapter train`.",
        "",
        "```bash",
        *filter(None, (make(job, data, folder=folder, bundle=bundle) for make in _COMMANDS)),
        "```",
        "",
        "## Data",
        "",
        f"- read from {', '.join(markdown_text(shown_name(place)) for place in job.data)}",
        f"- SHA-256 of questions, answers and pictures: `{data.digest}`",
        f"- split by picture with seed {job.seed}: {len(data.train):,} examples to learn, {len(data.validation):,} for "
        f"validation, {len(data.test):,} for the test; `{DATA}` has the digests of all pictures, and a table such as "
        f"`{table_name(TEST)}` the examples of each part",
        f"- pictures that could not be read and are left out: {len(unreadable):,}",
        "",
        *_answers(data),
        "## Training",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {what} | {markdown_text(value)} |" for what, value in _facts(job, model, data, state, why=why)),
        f"| peak memory | {markdown_text(memory)} |",
        f"| learning rate | {job.lr:g}, warm-up {optimisation.warmup:.0%} of the steps, then a cosine to "
        f"{optimisation.final_lr:.0%} |",
        f"| AdamW | weight decay {optimisation.weight_decay:g}, norm of gradients at most {optimisation.max_norm:g} |",
        "",
        "## Scores",
        "",
        *([] if scores else [f"The test examples are not scored: {markdown_text(unscored)}", ""]),
    ]
    text = "\n".join(lines) + "\n" + "\n".join(_nested(as_markdown(one)) for one in scores)
    with atomic_write(folder / CARD) as file:
        file.write((text.rstrip() + "\n").encode(errors="backslashreplace"))


def _answers(data: TrainingData) -> list[str]:
    parts = [Counter(one.example.answers[0] for one in part) for part in (data.train, data.validation, data.test)]
    if data.task == "caption" or len(parts[0]) > _MOST_ANSWERS:
        return []
    rows = [
        f"| {markdown_text(shown_excerpt(answer))} | {' | '.join(str(part[answer]) for part in parts)} |"
        for answer in sorted(parts[0])
    ]
    return ["| answer | learn | validation | test |", "| --- | --- | --- | --- |", *rows, ""]


def _facts(
    job: TrainJob, model: TrainableModel, data: TrainingData, state: LoopState, *, why: str
) -> list[tuple[str, str]]:
    counts = ", ".join(f"{count:,} in {kind}" for kind, count in model.counts().items())
    return [
        ("sets of parameters", ", ".join(job.choice.sets)),
        ("numbers that are trained", f"{sum(model.counts().values()):,}: {counts}"),
        ("numbers of frozen weights", str(model.dtype).removeprefix("torch.")),
        ("steps", f"{state.step:,} of {state.num_steps:,}, {_ENDS.get(why, why)}"),
        ("best step", f"{state.best_step:,}"),
        ("examples a step", f"{job.optimisation.step_size(len(data.train)):,}"),
        ("examples learnt, each epoch counted", f"{state.num_examples:,}"),
        ("steps skipped, because a loss was not finite", f"{len(state.skipped)}"),
        ("seconds", f"{state.elapsed_s:.0f}"),
        ("seed", f"{job.seed}"),
    ]


def _nested(markdown: str) -> str:
    """The Markdown with all headings two levels lower."""
    return "\n".join(f"##{line}" if line.startswith("#") else line for line in markdown.splitlines())
