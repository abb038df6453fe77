"""The commands of tasks (`caption`, `ask`, `generate`): flags -> a job."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llama_adapter.app.captioning.tasks.entry import TaskEntry
from llama_adapter.app.captioning.tasks.registry import entries_by_command, installed, question_of, tasks
from llama_adapter.app.command_line.commands.records import add_deciding
from llama_adapter.app.command_line.model_flags import (
    add_batch_size,
    add_cluster,
    add_computation,
    add_model,
    add_sample_fields,
)
from llama_adapter.app.command_line.parser import Parser, command, default
from llama_adapter.app.command_line.values import in_flags, parse_shard, settings, spec_from, value_of
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.prefixes import is_prefixes
from llama_adapter.app.pictures.reading.spec import DEFAULT_PICTURE_TIMEOUT_S, DEFAULT_READER
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.terminal.stderr_lines import say

if TYPE_CHECKING:
    from llama_adapter.app.pictures.inputs import InputSpec

SAMPLING = SamplingParams()

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
    texts = {"help": first.help, "description": first.description}
    command(commands, name, partial(_run, entries), declare=partial(_declare, entries), **texts)


def _declare(entries: Sequence[TaskEntry], parser: Parser) -> None:
    sees_pictures = entries[0].needs_picture
    if sees_pictures:
        add_pictures(parser)
    prompt = parser.add_argument_group("prompt", section="prompt")
    for option in (option for entry in entries for option in entry.options):
        prompt.add_argument(
            option.flag,
            key=option.flag.strip("-").replace("-", "_"),
            dest=option.name,
            metavar=option.metavar,
            type=value_of(option.parse),
            separator=option.separator,
            first=option.name not in ("input", "raw"),
            help=option.help,
        )
    if sees_pictures:
        prompt.add_argument(
            "--questions",
            metavar="FILE",
            help="questions to ask about every picture: .txt with one per line, or a table (CSV, JSON, "
            "Parquet) with columns question, input, choices",
        )
    else:
        _add_prompt_files(prompt)
    if any(entry.has_probabilities for entry in entries):
        add_deciding(
            parser.add_argument_group("decisions, with --choices; records keep the probabilities", section="output")
        )
        _add_calibrating(parser.add_argument_group("calibration, instead of answering", section="output"))
    _add_output(parser)
    add_model(parser)
    _add_sampling(parser.add_argument_group("answer", section="generation"))
    compute = parser.add_argument_group("computation", section="computation")
    add_batch_size(compute)
    add_computation(compute)
    if sees_pictures:
        _add_engine(parser.add_argument_group("many machines (extra `ray`)", section="parallel"))


def _add_prompt_files(group: Any) -> None:
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        dest="prompt_files",
        key="prompt_file",
        first=True,
        action="append",
        default=[],
        help="prompts: .txt with one per line, or a table (CSV, JSON, Parquet) with columns prompt (or question, "
        "instruction, src), input, choices, or a list of texts in JSON; --prompt is for rows with an input only; - is "
        "stdin, one prompt per line",
    )
    group.add_argument("--raw", action="store_true", help="prompts without the instruction template")
    group.add_argument(
        "--text-prefix",
        choices=("none", "zeros", "learned"),
        help="what the model attends to instead of a picture: nothing, a picture of zeros (as in the training of "
        "LLaMA-Adapter V2 on texts), or the learned prompt of a LLaMA-Adapter V1 adapter (default: as in the model's "
        "training)",
    )
    group.add_argument("--limit", section="input", metavar="N", type=int, help="only the first N prompts")
    group.add_argument(
        "--paddlenlp-out",
        section="output",
        metavar="FILE.json",
        help="when the run ends, write its answers from the records in --out in PaddleNLP's format too: lines of src, "
        "tgt (from the file of prompts) and output; an existing file is replaced",
    )


def add_listing(commands: Any) -> None:
    """Add `tasks`."""
    description = "List the tasks: what each takes and answers.\n"
    command(commands, "tasks", _list_tasks, help="list the tasks", description=description)


def _list_tasks(options: argparse.Namespace) -> int:
    for entry in tasks():
        print(f"{entry.name}: takes {entry.takes}; answers {entry.answers} (`llama-adapter {entry.command}`)")
    return ExitCode.OK


def add_pictures(parser: Parser) -> None:
    parser.add_argument(
        "paths",
        key="pictures",
        section="input",
        first=True,
        metavar="PICTURES",
        nargs="*",
        help="picture files, folders, patterns such as 'a/**/*.jpg', tar archives (webdataset), or what `encode` wrote",
    )
    group = parser.add_argument_group("pictures", section="input")
    group.add_argument("--recursive", action="store_true", first=True, help="include sub-folders")
    group.add_argument(
        "--list",
        metavar="FILE",
        dest="lists",
        action="append",
        default=[],
        help="a file with the names of pictures, folders and archives, one per line, relative to the current folder; "
        "- is stdin",
    )
    group.add_argument(
        "--manifest",
        metavar="FILE",
        dest="manifests",
        action="append",
        default=[],
        help="a table (CSV, JSON, Parquet) with a column picture, relative to the table's folder; its columns prompt, "
        "input and choices take precedence over the flags, and the others are {variables} for prompts",
    )
    add_sample_fields(group)
    group.add_argument("--limit", metavar="N", type=int, help="only the first N pictures")
    group.add_argument(
        "--shard",
        metavar="I/N",
        type=parse_shard,
        separator="/",
        help="only part I of N, from 0/4 to 3/4 for example; a picture's name determines its part",
    )
    add_reading(group)


def add_reading(group: Any) -> None:
    """Add the flags for reading pictures."""
    group.add_argument(
        "--reader",
        choices=("process", "thread"),
        default=DEFAULT_READER,
        help=default("what reads pictures; --picture-timeout-s needs processes"),
    )
    group.add_argument(
        "--picture-timeout-s",
        metavar="S",
        type=float,
        default=DEFAULT_PICTURE_TIMEOUT_S,
        help=default("read timeout per picture, in seconds"),
    )


def _add_output(parser: Parser) -> None:
    output = parser.add_argument_group("output", section="output")
    output.add_argument(
        "--out",
        metavar="FILE.jsonl",
        first=True,
        help="append records, one JSON line each, to a file, or to the last part-*.jsonl of a folder (FOLDER/); "
        "questions with an answer there are skipped",
    )
    add_resuming(output)
    output.add_argument(
        "--output-ids", action="store_true", help="add the token ids of the text to each record, as `output_ids`"
    )
    output.add_argument(
        "--format", choices=("text", "jsonl"), help="format on stdout (default: text on a terminal, jsonl in a pipe)"
    )
    profiling = parser.add_argument_group("profiling", section="profiling")
    profile = profiling.add_mutually_exclusive_group()
    profile.add_argument(
        "--profile",
        action="store_const",
        const="wait",
        help="print stage times on stderr; waits for the device at each stage",
    )
    profile.add_argument(
        "--profile-marks",
        action="store_const",
        const="marks",
        dest="profile",
        help="print stage times without waiting, by marks in the device's queue",
    )
    profiling.add_argument(
        "--trace", metavar="FOLDER", help="write a trace of the first stages, for Perfetto and chrome://tracing"
    )
    output.add_argument(
        "--quiet", action="store_true", help="no progress and no notes on stderr, only errors without a record"
    )


def add_resuming(output: Any) -> None:
    """Add the flags that say what to do with the records of earlier runs."""
    earlier = output.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume",
        action="store_const",
        const=False,
        default=False,
        dest="overwrite",
        help="continue the records in --out (default)",
    )
    earlier.add_argument("--overwrite", action="store_true", help="delete the records in --out and start over")
    output.add_argument("--max-errors", metavar="N", type=int, help="stop after N failures (default: never)")
    output.add_argument("--retry-errors", action="store_true", help="retry pictures whose record in --out is an error")


def _add_sampling(group: Any) -> None:
    for flag, metavar, kind, text in (
        ("--max-new-tokens", "N", int, "maximum number of tokens of an answer"),
        ("--temperature", "T", float, "0 takes the most likely token"),
        ("--top-p", "P", float, "probability of the smallest token set to draw from, with a temperature above 0"),
        ("--top-k", "K", int, "number of most likely tokens to draw from; 0 keeps all"),
        ("--repetition-penalty", "X", float, "for tokens in prompt or answer; 1 is no penalty"),
    ):
        usual = getattr(SAMPLING, flag.removeprefix("--").replace("-", "_"))
        group.add_argument(flag, metavar=metavar, type=kind, default=usual, help=default(text))
    group.add_argument("--seed", metavar="S", type=int, help="makes sampled answers repeatable")
    group.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="ends the answer; may be given several times"
    )
    group.add_argument(
        "--max-length", metavar="N", type=int, help="maximum number of tokens of prompt and answer together"
    )
    group.add_argument(
        "--max-prompt-tokens",
        metavar="N",
        type=int,
        help="cut the beginning of a longer prompt; its record has the number of tokens cut, as `prompt_tokens_cut`",
    )


def _add_engine(group: Any) -> None:
    add_cluster(group, ray="uses all machines of a cluster")
    group.add_argument("--actors", metavar="N", type=int, help="number of captioners (default: one per device)")


def _run(entries: Sequence[TaskEntry], options: argparse.Namespace) -> int:
    flags = {option.name: option.flag for entry in entries for option in entry.options}
    needs_question = any(entry.needs_instruction for entry in entries)
    with in_flags(flags, effective=options.effective):
        common = question_of(vars(options), command=entries[0].command)
    sees_pictures = entries[0].needs_picture
    sheet_file = options.questions if sees_pictures else None
    if sheet_file is not None and not common.is_caption:
        given = flags["instruction"]
        raise UsageError(f"--questions and {given} exclude each other", hint="put all questions into the sheet")
    if getattr(options, "calibrate", None) is not None:
        return _calibrate(options)
    if any(getattr(options, name, None) is not None for name in ("calibration_out", "plot")):
        raise UsageError("--calibration-out and --plot go with --calibrate, which is missing")
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
    from llama_adapter.app.jobs.clusters.cluster import RayOptions
    from llama_adapter.app.jobs.job import Job
    from llama_adapter.app.jobs.questions import complete
    from llama_adapter.app.pictures.inputs import read_question_sheet
    from llama_adapter.runtime.settings.sources import to_run_again

    spec = spec_from(options, sees_pictures=sees_pictures)
    if not sees_pictures and options.text_prefix == "zeros" and spec.is_llama_alone:
        raise UsageError("--text-prefix zeros needs --adapter")
    inputs = inputs_from(options) if sees_pictures else _prompts_from(options)
    is_encoded = sees_pictures and are_encoded(inputs)
    if is_encoded:
        spec = _for_prefixes(spec, inputs, options)
    sheet = () if sheet_file is None else read_question_sheet(sheet_file)
    values = {
        "spec": spec,
        "inputs": inputs,
        "questions": tuple(complete(common, question) for question in sheet) or (common,),
        "sampling": settings(SamplingParams, vars(options)),
        "needs_question": needs_question,
        "settings": to_run_again(options.effective, command=entries[0].command),
    }
    if not sees_pictures or is_encoded:
        values["reader"] = "thread"  # no pictures are read, so no reading processes are needed
    job = settings(Job, {**vars(options), **values})
    from llama_adapter.app.jobs.run import run_job

    if not sees_pictures:
        return run_job(job)
    is_ray = options.engine == "ray"
    if not is_ray and (options.actors is not None or options.ray_address is not None):
        raise UsageError("--actors and --ray-address go with --engine ray, which is missing")
    ray = settings(RayOptions, {**vars(options), "address": options.ray_address})
    if not is_ray:
        return run_job(job)
    from llama_adapter.app.jobs.clusters.runner import RayRunner

    return run_job(job, RayRunner(ray))


def _add_calibrating(group: Any) -> None:
    group.add_argument(
        "--calibrate",
        metavar="DATA",
        help="fit a temperature and a threshold to labelled pictures, whose answers are among --choices: a table, a "
        "folder of folders by class or another form that `eval` takes; with PICTURES, only those of them are used",
    )
    group.add_argument("--calibration-out", metavar="FILE.json", help="where to write the calibration")
    group.add_argument(
        "--target-precision",
        metavar="P",
        type=float,
        default=0.95,
        help=default("wanted precision of answers above the threshold"),
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw a reliability diagram (extra `bench`)")
    group.add_argument("--force", action="store_true", help="replace existing files")


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

    values = {"spec": spec, "question": options.instruction, "pictures": tuple(options.paths)}
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


def _prompts_from(options: argparse.Namespace) -> "InputSpec":
    from llama_adapter.app.pictures.inputs import InputSpec

    files = tuple(options.prompt_files)
    with in_flags({"limit": "--limit"}, effective=options.effective):
        return InputSpec(is_text=True, prompt_files=files, are_raw=options.raw, limit=options.limit)


def inputs_from(options: argparse.Namespace) -> "InputSpec":
    from llama_adapter.app.pictures.inputs import InputSpec

    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items()}
    if not any(values[name] for name in ("paths", "lists", "manifests")):
        raise UsageError(
            "No pictures are named",
            hint="name files or folders, or pass --list or --manifest; `--list -` reads names from stdin",
        )
    if "-" in values["paths"]:
        raise UsageError(
            "`-` is not a picture: pictures are not read from stdin",
            hint="`--list -` reads names from stdin, one per line; a file named - is `./-`",
        )
    return settings(InputSpec, values)
