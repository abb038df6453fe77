"""`caption` and `ask`: flags -> a job."""

import argparse
import os
from typing import Any

from llama_adapter.app.cli.calibrating import add_calibrating, run_calibrate
from llama_adapter.app.cli.model_flags import SPEC, add_computation, add_model, with_batch_size
from llama_adapter.app.cli.parser import Parser, command, default
from llama_adapter.app.cli.records import add_deciding
from llama_adapter.app.cli.values import parse_choices, parse_shard, parse_text, settings, spec_from
from llama_adapter.app.inputs import InputSpec, read_question_sheet
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.questions import complete
from llama_adapter.app.scale.cluster import RayOptions
from llama_adapter.app.tasks.question import Question
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import UsageError

SAMPLING = SamplingParams()

_DERIVED = {".csv": "--to csv", ".tsv": "--to csv", ".parquet": "--to parquet", ".txt": "--to sidecars"}

JOB = Job(spec=SPEC, inputs=InputSpec(), questions=(Question(),))

_CAPTION = """\
Describe each picture. Answers are written as they are ready: as lines of text on a terminal, as JSON lines into a
pipe or a file. A picture that cannot be read gets an error record and does not touch the others.

  llama-adapter caption photo.jpg folder/
  llama-adapter caption photos --recursive --out captions.jsonl      again, and it goes on where it ended
"""

_ASK = """\
Ask the same question about each picture. With --choices the answer is the likeliest of them, with its probability;
otherwise it is written freely. Output as of `caption`.

  llama-adapter ask photos --recursive --question "Is there a person?" --choices yes,no --out answers.jsonl
  llama-adapter export-records answers.jsonl --to csv --out answers.csv
"""


def add_caption(commands: Any) -> None:
    """`caption`."""
    caption = command(commands, "caption", _run_caption, help="describe pictures", description=_CAPTION)
    _add_pictures(caption)
    prompt = caption.add_argument_group("prompt")
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        type=parse_text,
        help="instruction, perhaps with {stem}, {name}, {parent} or {path} of the picture (default: the model's own "
        "for captions)",
    )
    prompt.add_argument("--input", metavar="TEXT", type=parse_text, help="further context for --prompt")
    prompt.add_argument(
        "--raw-prompt", metavar="TEXT", type=parse_text, help="text that goes to the model without the template"
    )
    _add_sheet(prompt)
    _add_answering(caption)


def add_ask(commands: Any) -> None:
    """`ask`."""
    ask = command(commands, "ask", _run_ask, help="ask a question about pictures", description=_ASK)
    _add_pictures(ask)
    prompt = ask.add_argument_group("question")
    prompt.add_argument("--question", metavar="TEXT", type=parse_text, help="what to ask")
    prompt.add_argument("--input", metavar="TEXT", type=parse_text, help="further context for the question")
    prompt.add_argument("--choices", metavar="A,B,...", type=parse_choices, help="answer with one of these")
    _add_sheet(prompt)
    add_deciding(ask.add_argument_group("deciding, with --choices; records keep the probabilities as they are"))
    add_calibrating(ask.add_argument_group("calibrating, in the place of answering"))
    _add_answering(ask)


def _add_pictures(parser: Parser) -> None:
    parser.add_argument(
        "paths",
        metavar="PICTURES",
        nargs="*",
        help="picture files, folders of them, patterns such as 'a/**/*.jpg', tar archives (of webdataset)",
    )
    group = parser.add_argument_group("pictures")
    group.add_argument("--recursive", action="store_true", help="also look into the folders in a folder")
    group.add_argument(
        "--list",
        metavar="FILE",
        dest="lists",
        action="append",
        default=[],
        help="a file that names pictures, folders and archives, one a line, from the current folder; - is stdin",
    )
    group.add_argument(
        "--manifest",
        metavar="FILE",
        dest="manifests",
        action="append",
        default=[],
        help="a .jsonl, .csv or .tsv table with a column picture, from the table's folder; its columns prompt, input "
        "and choices go before the flags, and all others can be {variables} of prompts",
    )
    group.add_argument("--limit", metavar="N", type=int, help="only the first N pictures, to try something out")
    group.add_argument(
        "--shard",
        metavar="I/N",
        type=parse_shard,
        help="only part I of N, counted from 0, as in 0/4 to 3/4: each picture belongs to one by its name as given",
    )
    group.add_argument(
        "--reader",
        choices=("process", "thread"),
        default=JOB.reader,
        help=default("what reads pictures; only processes can be stopped by --picture-timeout-s"),
    )
    group.add_argument(
        "--picture-timeout-s",
        metavar="S",
        type=float,
        default=JOB.picture_timeout_s,
        help=default("read timeout per picture, in seconds"),
    )


def _add_engine(group: Any) -> None:
    group.add_argument(
        "--engine", choices=("local", "ray"), default="local", help=default("ray answers on all machines of a cluster")
    )
    group.add_argument(
        "--actors", metavar="N", type=int, help="captioners at once (default: one for each device of the cluster)"
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="of a running cluster (default: that of RAY_ADDRESS, else one on this machine alone)",
    )


def _add_sheet(group: Any) -> None:
    group.add_argument(
        "--questions",
        metavar="FILE",
        help="a sheet of questions to ask about every picture: .txt with one a line, or .jsonl, .csv or .tsv with "
        "columns question, input, choices",
    )


def _add_answering(parser: Parser) -> None:
    _add_output(parser)
    add_model(parser)
    answer = parser.add_argument_group("answer")
    answer.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=SAMPLING.max_new_tokens, help=default("an answer ends there")
    )
    answer.add_argument(
        "--temperature", metavar="T", type=float, default=SAMPLING.temperature, help=default("0 takes the best token")
    )
    answer.add_argument(
        "--top-p", metavar="P", type=float, default=SAMPLING.top_p, help=default("with a temperature above 0")
    )
    answer.add_argument("--top-k", metavar="K", type=int, default=SAMPLING.top_k, help=default("0 keeps every token"))
    answer.add_argument("--seed", metavar="S", type=int, help="makes sampled answers repeatable")
    add_computation(with_batch_size(parser))
    _add_engine(parser.add_argument_group("many machines (extra `ray`)"))


def _add_output(parser: Parser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="FILE.jsonl",
        help="append records, a JSON line each, to a file, or to the last part-*.jsonl of a folder (FOLDER/); what is "
        "answered there already is left out",
    )
    earlier = output.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume",
        action="store_const",
        const=False,
        default=False,
        dest="overwrite",
        help="go on with what --out holds (the default)",
    )
    earlier.add_argument("--overwrite", action="store_true", help="throw away what --out holds, and begin anew")
    output.add_argument(
        "--max-errors", metavar="N", type=int, help="stop after so many failures (default: finish all the same)"
    )
    output.add_argument("--retry-errors", action="store_true", help="try pictures again that failed according to --out")
    output.add_argument(
        "--format", choices=("text", "jsonl"), help="on stdout (default: text on a terminal, jsonl in a pipe)"
    )
    profile = output.add_mutually_exclusive_group()
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
        help="the same without waiting, by marks in the device's queue",
    )
    output.add_argument(
        "--quiet", action="store_true", help="no progress and no notes on stderr; errors that no record holds are told"
    )


def _run_caption(options: argparse.Namespace) -> int:
    if options.input is not None and options.prompt is None:
        raise UsageError("--input goes with --prompt, which is missing", hint="give the instruction as --prompt")
    if options.raw_prompt is not None and options.prompt is not None:
        raise UsageError("--prompt and --raw-prompt exclude each other", hint="give one of them")
    if options.questions is not None and (options.prompt is not None or options.raw_prompt is not None):
        raise UsageError("--questions and --prompt exclude each other", hint="put all questions into the sheet")
    return _answer(options, instruction=options.prompt, raw=options.raw_prompt)


def _run_ask(options: argparse.Namespace) -> int:
    if options.questions is not None and options.question is not None:
        raise UsageError("--questions and --question exclude each other", hint="put all questions into the sheet")
    if options.calibrate is not None:
        return run_calibrate(options)
    if options.calibration_out is not None or options.plot is not None:
        raise UsageError("--calibration-out and --plot go with --calibrate, which is missing")
    is_asked = options.questions is not None or options.question is not None
    if not is_asked and (options.paths or options.lists or not options.manifests):
        raise UsageError("ask needs a --question", hint="or several in a file: --questions, or --manifest alone")
    if options.question is not None and not options.question.strip():
        raise UsageError("Wanted a --question, got an empty text", hint="see that the variable it comes from is set")
    return _answer(options, instruction=options.question, choices=options.choices, needs_question=True)


def _answer(
    options: argparse.Namespace,
    *,
    instruction: str | None,
    raw: str | None = None,
    choices: tuple[str, ...] | None = None,
    needs_question: bool = False,
) -> int:
    _check_out(options.out)
    spec = spec_from(options)
    sampling = settings(SamplingParams, vars(options))
    common = Question(instruction=instruction, input=options.input, raw=raw, choices=choices)
    inputs = _inputs_from(options)
    sheet = () if options.questions is None else read_question_sheet(options.questions)
    questions = tuple(complete(common, question) for question in sheet) or (common,)
    values = {"spec": spec, "inputs": inputs, "questions": questions, "sampling": sampling}
    job = settings(Job, {**vars(options), **values, "needs_question": needs_question})
    if options.engine == "ray":
        ray = settings(RayOptions, {**vars(options), "address": options.ray_address})
        from llama_adapter.app.jobs.run import run_job
        from llama_adapter.app.scale.runner import RayRunner

        return run_job(job, RayRunner(ray))
    if options.actors is not None or options.ray_address is not None:
        raise UsageError("--actors and --ray-address go with --engine ray, which is missing")
    from llama_adapter.app.jobs.run import run_job

    return run_job(job)


def _check_out(out: str | None) -> None:
    """Raise UsageError for a name under which nobody would look for records."""
    kind = _DERIVED.get(os.path.splitext(out or "")[1].lower())
    if kind is not None:
        raise UsageError(
            f"--out takes records, which are JSON lines, and `{out}` is named as something else",
            hint=f"name it .jsonl, and make the other of it: `llama-adapter export-records FILE.jsonl {kind}`",
        )


def _inputs_from(options: argparse.Namespace) -> InputSpec:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(options).items()}
    if not any(values[name] for name in ("paths", "lists", "manifests")):
        raise UsageError(
            "No pictures are named",
            hint="name files or folders, or pass --list or --manifest; `--list -` takes names from stdin",
        )
    if "-" in values["paths"]:
        raise UsageError(
            "`-` is not the name of a picture, and pictures are not read from stdin",
            hint="`--list -` takes names from stdin, one a line; a file of this name is `./-`",
        )
    return settings(InputSpec, values)
