"""The commands of tasks (`caption`, `ask`, `generate`): flags -> a job. Also `export-records`."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_adapter.app.captioning.tasks.entry import TaskEntry
from llama_adapter.app.captioning.tasks.registry import entries_by_command, installed, question_of, tasks
from llama_adapter.app.command_line.flags import add_flags, command
from llama_adapter.app.command_line.parser import Parser
from llama_adapter.app.command_line.values import in_flags, refuse_without, settings, spec_from, value_of
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.prefixes import is_prefixes
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.terminal.stderr_lines import say

if TYPE_CHECKING:
    from llama_adapter.app.pictures.inputs import InputSpec

_DERIVED = {".csv": "--to csv", ".tsv": "--to csv", ".parquet": "--to parquet", ".txt": "--to sidecars"}


def add_tasks(commands: Any) -> None:
    """Add a command for each command name in the task registry."""
    for name, entries in entries_by_command().items():
        if entries[0].name not in installed():
            _add_task(commands, name, entries)


def add_installed_tasks(commands: Any) -> None:
    """Add the commands of tasks of installed packages; called after all other commands were added.

    A command whose name or flags conflict with existing ones is left out, with a note.
    """
    for name, entries in entries_by_command().items():
        if entries[0].name in installed():
            try:
                _declare(entries, Parser(prog=name))
                _add_task(commands, name, entries)
            except (argparse.ArgumentError, ValueError) as error:
                say(f"note: the command `{name}` of the task `{entries[0].name}` is left out: {error}")


def _add_task(commands: Any, name: str, entries: Sequence[TaskEntry]) -> None:
    if name in commands.choices:
        raise ValueError("there is a command of that name already")
    first = entries[0]
    run, declare = partial(_run, entries), partial(_declare, entries)
    command(commands, name, run, declare=declare, help=first.help, description=first.description)


def _declare(entries: Sequence[TaskEntry], parser: Parser) -> None:
    sees_pictures = entries[0].needs_picture
    if sees_pictures:
        add_flags(parser, "pictures")
    prompt = parser.add_argument_group("prompt", section="prompt")
    for option in (option for entry in entries for option in entry.options):
        several: dict[str, Any] = (
            {"action": "append"} if (option.flag, option.name) == ("--prompt", "instruction") else {}
        )
        prompt.add_argument(
            option.flag,
            key=option.flag.strip("-").replace("-", "_"),
            dest=option.name,
            metavar=option.metavar,
            type=value_of(option.parse),
            separator=option.separator,
            first=option.name not in ("input", "raw"),
            help=f"{option.help}; may be given several times" if several else option.help,
            **several,
        )
    add_flags(parser, "questions" if sees_pictures else "prompts")
    if any(entry.has_probabilities for entry in entries):
        add_flags(parser, "decisions")
    add_flags(parser, "answers")
    if sees_pictures:
        add_flags(parser, "machines")


def list_tasks(options: argparse.Namespace) -> int:
    for entry in tasks():
        print(f"{entry.name}: takes {entry.takes}; the answer is {entry.answers} (`llama-adapter {entry.command}`)")
    return ExitCode.OK


def _run(entries: Sequence[TaskEntry], options: argparse.Namespace) -> int:
    flags = {option.name: option.flag for entry in entries for option in entry.options}
    needs_question = any(entry.needs_instruction for entry in entries)
    with in_flags(flags, effective=options.effective):
        asked = getattr(options, "instruction", None)  # a task may have no such option
        texts = asked if isinstance(asked, list) else [asked]
        each = [{**vars(options), "instruction": text} for text in texts or (None,)]
        common, *others = (question_of(one, command=entries[0].command) for one in each)
    sees_pictures = entries[0].needs_picture
    sheet_file = options.questions if sees_pictures else None
    if sheet_file is not None and not common.is_caption:
        given = flags["instruction"]
        raise UsageError(f"--questions and {given} exclude each other", hint="put all questions into the sheet")
    if getattr(options, "calibrate", None) is not None:
        return _calibrate(options)
    refuse_without("--calibrate", options, "calibration_out", "plot")
    is_asked = sheet_file is not None or not common.is_caption
    if sees_pictures:
        lacks_question = not is_asked and (options.paths or options.lists or not options.manifests)
        elsewhere = "--questions, or --manifest alone"
    else:
        lacks_question, elsewhere = not is_asked and not options.prompt_files, "--prompt-file"
    if needs_question and lacks_question:
        raise UsageError(
            f"{entries[0].command} needs a {flags['instruction']}", hint=f"or several in a file: {elsewhere}"
        )
    _check_out(options.out)
    from llama_adapter.app.jobs.job import Job
    from llama_adapter.app.jobs.questions import complete
    from llama_adapter.app.pictures.inputs import InputSpec, read_question_sheet
    from llama_adapter.runtime.settings.sources import to_run_again

    spec = spec_from(options, sees_pictures=sees_pictures)
    if not sees_pictures and options.text_prefix == "zeros" and spec.is_llama_alone:
        raise UsageError("--text-prefix zeros needs --adapter")
    if sees_pictures:
        inputs = inputs_from(options)
    else:
        inputs = settings(InputSpec, {**vars(options), "is_text": True, "are_raw": options.raw})
    is_encoded = sees_pictures and are_encoded(inputs)
    if is_encoded:
        spec = _for_prefixes(spec, inputs, options)
    sheet = () if sheet_file is None else read_question_sheet(sheet_file)
    values = {
        "spec": spec,
        "inputs": inputs,
        "questions": tuple(complete(common, question) for question in sheet) or (common, *others),
        "sampling": settings(SamplingParams, vars(options)),
        "needs_question": needs_question,
        "settings": to_run_again(options.effective, command=entries[0].command),
    }
    if not sees_pictures or is_encoded:
        values["reader"] = "thread"  # no pictures are read, so no reading processes are needed
    job = settings(Job, {**vars(options), **values})
    from llama_adapter.app.jobs.run import run_job

    if not sees_pictures or options.engine != "ray":
        refuse_without("--engine ray", options, "actors", "ray_address")
        return run_job(job)
    from llama_adapter.app.jobs.clusters.cluster import RayOptions
    from llama_adapter.app.jobs.clusters.runner import RayRunner

    return run_job(job, RayRunner(settings(RayOptions, {**vars(options), "address": options.ray_address})))


def _calibrate(options: argparse.Namespace) -> int:
    for name in ("questions", "lists", "manifests", "shard", "out", "threshold", "abstain", "calibration"):
        if getattr(options, name):
            flag = "--" + name.rstrip("s" if name in ("lists", "manifests") else "").replace("_", "-")
            raise UsageError(f"--calibrate takes its own pictures, so {flag} cannot be used with it")
    for name in ("calibration_out", "choices"):
        if getattr(options, name) is None:
            raise UsageError(f"--calibrate goes with --{name.replace('_', '-')}, which is missing")
    spec = spec_from(options)
    from llama_adapter.app.learning.calibration.calibrate import CalibrationJob, run_calibration

    values = {"spec": spec, "question": options.instruction, "pictures": options.paths}
    with locked_output(options.calibration_out):
        return run_calibration(settings(CalibrationJob, {**vars(options), **values}))


def are_encoded(inputs: "InputSpec") -> bool:
    """Whether the inputs are prefix files. Raises UsageError if only some are."""
    encoded = [name for name in inputs.paths if is_prefixes(name)]
    if encoded and (len(encoded) < len(inputs.paths) or inputs.lists or inputs.manifests):
        raise UsageError(
            f"`{encoded[0]}` holds encoded pictures, and other inputs are pictures: a run takes one or the other",
            hint="answer for them in two runs; --out may name the same file",
        )
    return bool(encoded)


def _for_prefixes(spec: CaptionerSpec, inputs: "InputSpec", options: argparse.Namespace) -> CaptionerSpec:
    """The spec for answering from prefix files, without an encoder."""
    if options.engine == "ray":
        raise UsageError("Encoded pictures do not go with --engine ray", hint="one process answers for them")
    if options.encoder is not None or options.vision is not None or options.encoder_process:
        raise UsageError("--vision, --encoder and --encoder-process have no meaning for pictures that are encoded")
    return dataclasses.replace(spec, vision="prefixes", encoder=inputs.paths[0])


def _check_out(out: str | None) -> None:
    """Raise UsageError for a file name with the suffix of another format, and for a folder of prefixes."""
    if out is not None and os.path.isdir(out) and is_prefixes(out):
        raise UsageError(f"`{out}` holds encoded pictures and their records", hint="name another place for the answers")
    kind = _DERIVED.get(os.path.splitext(out or "")[1].lower())
    if kind is not None:
        raise UsageError(
            f"--out writes records, which are JSON lines; `{out}` has the suffix of another format",
            hint=f"name it .jsonl, and convert it afterwards: `llama-adapter export-records FILE.jsonl {kind}`",
        )


def inputs_from(options: argparse.Namespace) -> "InputSpec":
    from llama_adapter.app.pictures.inputs import InputSpec

    if not (options.paths or options.lists or options.manifests):
        raise UsageError(
            "No pictures are named",
            hint="name files or folders, or pass --list or --manifest; `--list -` reads names from stdin",
        )
    if "-" in options.paths:
        raise UsageError(
            "`-` is not a picture: pictures are not read from stdin",
            hint="`--list -` reads names from stdin, one per line; a file named - is `./-`",
        )
    return settings(InputSpec, vars(options))


def run_export_records(options: argparse.Namespace) -> int:
    """`export-records`."""
    from llama_adapter.app.jobs.exports.job import ExportRecordsJob
    from llama_adapter.app.jobs.exports.job import run_export_records as run

    return run(settings(ExportRecordsJob, vars(options)))
