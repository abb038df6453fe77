"""The command line: flags -> plain values -> the code that does the work. Help and usage errors load no model code."""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from app.errors import Exit, UsageError, run_guarded
from app.service_types import ServiceLimits
from app.spec import CaptionerSpec
from app.startup import decline_telemetry, defer_device_extensions
from llm.engine.sampling_params import SamplingParams
from vision.export import defaults as export_defaults

if TYPE_CHECKING:
    from app.checkpoints import ModelSources

T = TypeVar("T")

SPEC = CaptionerSpec()
SAMPLING = SamplingParams()
LIMITS = ServiceLimits()
CONVERT_DTYPE = "float16"

_DESCRIPTION = """\
Caption pictures and answer questions about them with LLaMA-Adapter V2 models.

  llama-adapter caption photo.jpg folder/
  llama-adapter ask photo.jpg --question "Is there a red circle?" --choices Yes,No
"""
_EXIT_CODES = """\
exit codes: 0 all good, 1 failed, 2 usage or a device that cannot be had, 3 finished but some pictures could not be
read, 130 interrupted
"""
_CAPTION = """\
Describe each picture. Answers are written as they are ready: as lines of text on a terminal, as JSON lines into a
pipe or a file. A picture that cannot be read gets an error record and does not touch the others.
"""
_ASK = """\
Ask the same question about each picture. With --choices the answer is the likeliest of them, with its probability;
otherwise it is written freely. Output as of `caption`.
"""
_CONVERT = """\
Read LLaMA, adapter and CLIP as they were downloaded, check that they fit together, and write them as one bundle that
loads fast: `--model BUNDLE` in the other commands.
"""
_EXPORT = """\
Write the picture encoder as a file for other runtimes: as ONNX, and an ONNX file as OM for Ascend chips.

  llama-adapter export onnx --adapter BIAS-7B.pth --clip ViT-L-14.pt --out clip.onnx
  llama-adapter export om clip.onnx --soc-version Ascend310P3
"""
_EXPORT_ONNX = """\
Write the encoder as ONNX, with normalisation inside: `input` (B, S, S, 3), RGB pixels in 0..255, to `output` (B, Q, D).
The file is compared with the encoder on pictures, and with what Ascend's ATC takes, before it is put in place. With
--adapter no LLaMA is needed; without --clip, ViT-L-14.pt is looked for beside the adapter, here and in ~/.cache/clip.
"""
_EXPORT_OM = """\
Convert an ONNX file to OM by Ascend's ATC, which has to be installed here: an OM for each batch size, or one with gears
for all of them. Beside each OM a side-car FILE.om.json says what is in it. --print-command needs no ATC; an OM that its
line has made gets its side-car by --adopt FILE.om, with the flags that it was made with.
"""
_QUANTIZE = """\
Round the weights of all linear layers of a bundle to 8 bits, each output with a scale of its own: half the size of
float16, and faster on a CPU that has the kernels (`doctor --environment` tells); elsewhere they are widened at load.
What the answers lose is measured in docs/int8.md.

  llama-adapter quantize --model BUNDLE --out BUNDLE-int8
"""
_DEVICE_KINDS = "cpu, cuda, cuda:N, npu, npu:N or auto"
_DEVICES = "cpu, cuda, cuda:1, npu:0, ... or auto"
_SERVE = """\
Answer over HTTP as OpenAI's chat completions do: pictures as data URIs, answers whole or streamed. Requests of all
clients share the engine's batches. SIGTERM answers what was accepted, then ends.

  llama-adapter serve --port 8000
  curl http://127.0.0.1:8000/docs
"""
_WEB = """\
A page to look at pictures and talk about them: chat, yes or no, batches, throughput; the API of `serve` is beside it.
It is for this machine alone unless --host says otherwise, and asks nobody for a password: elsewhere, put a proxy with
one before it.
"""
_DOCTOR = """\
Check this installation part by part and a model tensor by tensor, and say what is wrong and what to do. Without model
flags the embedded model is checked. What the intended use does not need may be absent. Exit code 0 when nothing is
wrong, else 1.
"""
_BENCH = """\
Measure how fast a model answers here, at several batch sizes, and how near that is to what the device can do: memory
bandwidth and matrix products are measured in the same run. --random needs no weights: 160M, 1B and 7B are LLaMAs of
that size behind ViT-L/14.

  llama-adapter bench --random 160M --dtype bfloat16 --workload caption
"""


class Parser(argparse.ArgumentParser):
    """Usage errors are raised, to be told like every other error."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=_help_hint(self.prog))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown arguments are an error here already: left to the parser above, its help would be pointed at."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are told on stderr, see app/errors.py."""
    defer_device_extensions()
    decline_telemetry()
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_guarded(lambda: _dispatch(arguments), debug="--debug" in arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except UsageError as error:
        error.hint = error.hint or _help_hint(options.prog)
        raise


def _help_hint(program: str) -> str:
    return f"`{program} --help` lists what there is"


def build_parser() -> Parser:
    """All commands and flags; defaults come from the dataclasses they end up in."""
    parser = Parser(prog="llama-adapter", description=_DESCRIPTION, epilog=_EXIT_CODES)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    caption = _command(commands, "caption", _run_caption, help="describe pictures", description=_CAPTION)
    _add_pictures(caption)
    prompt = caption.add_argument_group("prompt")
    prompt.add_argument(
        "--prompt", metavar="TEXT", type=parse_text, help="instruction (default: the model's own for captions)"
    )
    prompt.add_argument("--input", metavar="TEXT", type=parse_text, help="further context for --prompt")
    prompt.add_argument(
        "--raw-prompt", metavar="TEXT", type=parse_text, help="text that goes to the model without the template"
    )
    _add_answering(caption)

    ask = _command(commands, "ask", _run_ask, help="ask a question about pictures", description=_ASK)
    _add_pictures(ask)
    prompt = ask.add_argument_group("question")
    prompt.add_argument("--question", metavar="TEXT", type=parse_text, required=True, help="what to ask")
    prompt.add_argument("--input", metavar="TEXT", type=parse_text, help="further context for the question")
    prompt.add_argument("--choices", metavar="A,B,...", type=parse_choices, help="answer with one of these")
    _add_answering(ask)

    convert = _command(commands, "convert", _run_convert, help="make a bundle of checkpoints", description=_CONVERT)
    _add_model(convert, bundle=False)
    convert.add_argument("--out", metavar="BUNDLE", required=True, help="folder to write")
    convert.add_argument(
        "--dtype", metavar="T", default=CONVERT_DTYPE, help="precision to store (default: %(default)s)"
    )
    convert.add_argument("--force", action="store_true", help="replace a bundle that is there already")

    _add_export(commands)
    _add_bench(commands)
    _add_quantize(commands)
    _add_serving(commands)

    doctor = _command(commands, "doctor", _run_doctor, help="check the installation and a model", description=_DOCTOR)
    _add_model(doctor)
    use = doctor.add_argument_group("intended use", "what is missing for it is an error; without, only for the CPU")
    use.add_argument("--device", metavar="D", default=SPEC.device, help=_default(_DEVICES))
    _add_precision(use)
    _add_encoder(use)
    doctor.add_argument("--environment", action="store_true", help="only the installation, no model")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: str) -> Parser:
    parser: Parser = commands.add_parser(name, epilog=_EXIT_CODES, **texts)
    parser.set_defaults(command=run, prog=parser.prog)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_pictures(parser: Parser) -> None:
    parser.add_argument(
        "pictures", metavar="PICTURE_OR_FOLDER", nargs="+", help="picture files; a folder means the pictures in it"
    )
    parser.add_argument("--recursive", action="store_true", help="also look into the folders of a folder")


def _add_model(parser: Parser, *, bundle: bool = True, llama: bool = True) -> None:
    """Without `llama`, flags of the language model are taken, as a line for another command has them, and not shown."""

    def shown(text: str) -> str:
        return text if llama else argparse.SUPPRESS

    group = parser.add_argument_group("model")
    if bundle:
        group.add_argument(
            "--model", metavar="BUNDLE", help="bundle written by `convert` (default: the embedded model)"
        )
    group.add_argument("--llama-dir", metavar="DIR", help=shown("LLaMA as Meta ships it, or a Hugging Face folder"))
    group.add_argument("--llama-type", metavar="NAME", help=shown("sub-folder of --llama-dir, for example 7B"))
    group.add_argument("--adapter", metavar="FILE", help="adapter, for example BIAS-7B.pth")
    group.add_argument("--clip", metavar="FILE", help="CLIP, for example ViT-L-14.pt")
    group.add_argument(
        "--visual-heads", metavar="N", type=int, help="heads of the visual blocks (default: 16 for width 768)"
    )
    group.add_argument(
        "--channel-order",
        choices=("rgb", "bgr"),
        default=SPEC.channel_order,
        help="colours' order in training (default: the bundle's own; bgr for released adapters, else rgb)",
    )
    group.add_argument(
        "--context",
        metavar="N",
        type=int,
        help=shown("tokens of prompt and answer together (default: the bundle's, or 512)"),
    )


def _add_answering(parser: Parser) -> None:
    _add_model(parser)
    answer = parser.add_argument_group("answer")
    answer.add_argument("--max-new-tokens", metavar="N", type=int, default=SAMPLING.max_new_tokens, help=_default())
    answer.add_argument(
        "--temperature", metavar="T", type=float, default=SAMPLING.temperature, help=_default("0 takes the best token")
    )
    answer.add_argument(
        "--top-p", metavar="P", type=float, default=SAMPLING.top_p, help=_default("with a temperature above 0")
    )
    answer.add_argument("--top-k", metavar="K", type=int, default=SAMPLING.top_k, help=_default("0 keeps every token"))
    answer.add_argument("--seed", metavar="S", type=int, help="makes sampled answers repeatable")
    _add_computation(_with_batch_size(parser))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="FILE.jsonl", help="append records to a file; pictures already answered there are left out"
    )
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


def _with_batch_size(parser: Parser) -> Any:
    compute = parser.add_argument_group("computation")
    compute.add_argument("--batch-size", metavar="N", type=int, default=SPEC.batch_size, help=_default())
    return compute


def _add_encoder(group: Any) -> None:
    group.add_argument(
        "--vision",
        choices=("torch", "onnx", "om"),
        help="what runs the picture encoder (default: torch, or what --encoder is a file of)",
    )
    group.add_argument("--encoder", metavar="FILE", help="exported encoder: an .onnx, an .om, or a folder of .om")
    group.add_argument(
        "--encoder-device", metavar="N", type=int, help="device of an OM (default: that of --device npu:N, else 0)"
    )


def _add_computation(compute: Any) -> None:
    compute.add_argument("--device", metavar="D", default=SPEC.device, help=_default(_DEVICES))
    compute.add_argument(
        "--dtype", metavar="T", default=SPEC.dtype, help=_default("float32, bfloat16 or float16, as the device allows")
    )
    _add_precision(compute)
    _add_encoder(compute)
    compute.add_argument(
        "--encoder-process", action="store_true", help="run an exported encoder in a process of its own"
    )
    compute.add_argument(
        "--mode", metavar="M", default=SPEC.mode, help=_default("eager, graph, or a graph mode of the device by name")
    )
    compute.add_argument(
        "--operators", choices=("auto", "aten"), default=SPEC.operators, help=_default("aten avoids fused operators")
    )
    compute.add_argument(
        "--exif", choices=("upright", "ignore"), default=SPEC.exif, help=_default("orientation that cameras store")
    )
    compute.add_argument(
        "--reading",
        choices=("exact", "fast"),
        default=SPEC.reading,
        help=_default("of pictures; fast differs by a level or so, much faster for large JPEGs"),
    )


def _add_precision(group: Any) -> None:
    group.add_argument(
        "--precision",
        choices=("float", "int8"),
        help="of the linear layers' weights; int8 rounds them to 8 bits, float keeps --dtype (default: as stored)",
    )


def _add_quantize(commands: Any) -> None:
    quantize = _command(commands, "quantize", _run_quantize, help="make an 8-bit bundle", description=_QUANTIZE)
    quantize.add_argument("--model", metavar="BUNDLE", help="bundle of floats (default: the embedded model)")
    quantize.add_argument("--out", metavar="BUNDLE", required=True, help="folder to write")
    quantize.add_argument("--precision", choices=("int8",), default="int8", help=_default("of the weights"))
    quantize.add_argument("--force", action="store_true", help="replace a bundle that is there already")


def _add_bench(commands: Any) -> None:
    bench = _command(commands, "bench", _run_bench, help="measure speed beside its ceilings", description=_BENCH)
    _add_model(bench)
    work = bench.add_argument_group("what is measured")
    work.add_argument("--random", metavar="SIZE", help="random weights: 160M, 1B, 7B, tiny or DIMxLAYERSxHEADSxFFN")
    work.add_argument(
        "--workload",
        choices=("yesno", "caption"),
        default="yesno",
        help=_default("yesno: a choice of two in one pass; caption: 64 new tokens"),
    )
    work.add_argument("--question", metavar="TEXT", type=parse_text, help="of yesno (default: about a person)")
    work.add_argument(
        "--batch-sizes", metavar="N,...", type=parse_batch_sizes, default="1,5,16", help=_default("in turn")
    )
    work.add_argument("--pictures", metavar="N", type=int, default=25, help=_default("sample pictures in each round"))
    work.add_argument("--rounds", metavar="N", type=int, default=3, help=_default())
    _add_computation(bench.add_argument_group("computation"))
    output = bench.add_argument_group("output")
    output.add_argument("--out", metavar="FILE.json", help="write the result as JSON")
    output.add_argument("--plot", metavar="FILE.png", help="draw the result, as PNG or SVG (needs matplotlib)")
    output.add_argument("--json", action="store_true", help="JSON on stdout in place of the table")
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_serving(commands: Any) -> None:
    serve = _command(commands, "serve", _run_serve, help="answer over HTTP, as OpenAI does", description=_SERVE)
    _add_server(serve, port=8000)
    web = _command(commands, "web", _run_web, help="a page for the browser, beside that", description=_WEB)
    _add_server(web, port=7860)


def _add_server(parser: Parser, *, port: int) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=_default("to listen at"))
    group.add_argument("--port", metavar="N", type=int, default=port, help=_default("0 takes a free one"))
    group.add_argument(
        "--host-name",
        metavar="NAME",
        dest="host_names",
        action="append",
        default=[],
        help="answer to this host name as well, as behind a proxy; repeat it for more",
    )
    group.add_argument("--max-body-mib", metavar="N", type=int, default=48, help=_default("of a request"))
    group.add_argument(
        "--drain-s", metavar="S", type=float, default=60.0, help=_default("seconds to answer what is left at the end")
    )
    group.add_argument("--quiet", action="store_true", help="no notes and no line for each request on stderr")
    api = parser.add_argument_group("API")
    api.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys to ask for, one a line, in a file that only its owner reads (or in LLAMA_ADAPTER_API_KEY)",
    )
    api.add_argument(
        "--allow-url-host",
        metavar="HOST",
        dest="allowed_hosts",
        action="append",
        default=[],
        help="fetch pictures by https from this host; repeat it for more (default: none are fetched)",
    )
    limits = parser.add_argument_group("limits")
    for name, kind, text in (
        ("max_waiting", int, "requests that wait for a slot; further ones are refused"),
        ("max_waiting_per_client", int, "of them of one client"),
        ("timeout_s", float, "seconds from a request to its whole answer"),
        ("max_pixels", int, "of a picture"),
        ("max_picture_bytes", int, "of a picture's file"),
        ("max_prompt_chars", int, "of a prompt"),
        ("encoded_bytes", int, "of pictures that are kept encoded for further questions"),
    ):
        default = getattr(LIMITS, name)
        metavar = "S" if kind is float else "N"
        flag = "--" + name.replace("_", "-")
        limits.add_argument(flag, metavar=metavar, type=kind, default=default, help=_default(text))
    _add_model(parser)
    _add_computation(_with_batch_size(parser))


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export", help="write the encoder for other runtimes", description=_EXPORT, epilog=_EXIT_CODES
    )
    kinds = export.add_subparsers(metavar="KIND", required=True)

    onnx = _command(kinds, "onnx", _run_export_onnx, help="the encoder as ONNX", description=_EXPORT_ONNX)
    _add_model(onnx, llama=False)
    onnx.add_argument("--out", metavar="FILE.onnx", required=True, help="file to write")
    onnx.add_argument("--dtype", choices=export_defaults.DTYPES, default=export_defaults.DTYPE, help=_default())
    onnx.add_argument(
        "--opset", type=int, choices=export_defaults.OPSETS, default=export_defaults.OPSET, help=_default()
    )
    onnx.add_argument(
        "--pictures", metavar="PICTURE", nargs="+", default=(), help="to compare with (default: sample pictures)"
    )
    onnx.add_argument("--force", action="store_true", help="replace the file when it is there already")

    om = _command(kinds, "om", _run_export_om, help="an ONNX file as OM for Ascend chips", description=_EXPORT_OM)
    om.add_argument("onnx", metavar="FILE.onnx", help="written by `export onnx`; others are tried too")
    om.add_argument("--out", metavar="NAME", help="OM to write, NAME_bsN.om without gears (default: as the ONNX file)")
    om.add_argument(
        "--batch-sizes",
        metavar="N,...",
        type=parse_batch_sizes,
        default=",".join(map(str, export_defaults.BATCH_SIZES)),
        help=_default("to compile for"),
    )
    om.add_argument("--gears", action="store_true", help="one OM that takes any of the batch sizes")
    om.add_argument(
        "--soc-version", metavar="CHIP", help="such as Ascend310P3 or Ascend910B3 (default: as npu-smi says)"
    )
    om.add_argument(
        "--precision-mode",
        metavar="MODE",
        default=export_defaults.PRECISION_MODE,
        help=_default("fp16, origin, mixed_float16, ..."),
    )
    om.add_argument(
        "--log-level",
        metavar="LEVEL",
        default=export_defaults.LOG_LEVEL,
        help=_default("of ATC: info, error, ..."),
    )
    om.add_argument(
        "--atc-flag", metavar="FLAG", dest="atc_flags", action="append", default=[], help="further, as --atc-flag=--x=y"
    )
    om.add_argument("--print-command", action="store_true", help="print what to run, and convert nothing")
    om.add_argument(
        "--adopt", metavar="FILE.om", help="write the side-car of an OM that atc made elsewhere, and convert nothing"
    )
    om.add_argument("--force", action="store_true", help="replace files, and convert what the lint refuses")


def _default(text: str = "") -> str:
    return f"{text} (default: %(default)s)".lstrip()


def parse_text(text: str) -> str:
    """Text for the model; raises UsageError when the locale could not read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"Wanted text in the encoding of this locale, {sys.getfilesystemencoding()}, but character "
            f"{error.start + 1} of {text!a} is none of it",
            hint="write UTF-8, in a UTF-8 locale: LC_ALL=C.UTF-8",
        ) from error
    return text


def parse_choices(text: str) -> tuple[str, ...]:
    """`Yes, No` -> ("Yes", "No"); raises ArgumentTypeError for fewer than two, empty or equal ones."""
    choices = tuple(choice.strip() for choice in parse_text(text).split(","))
    if len(choices) < 2 or not all(choices) or len(set(choices)) < len(choices):
        raise argparse.ArgumentTypeError(f"wanted at least two different answers with commas between, got {text!r}")
    return choices


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`1,2,4` -> (1, 2, 4); raises ArgumentTypeError for anything else than whole numbers above 0."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"wanted whole numbers of at least 1 with commas between, got {text!r}")
    return sizes


def spec_from(options: argparse.Namespace) -> CaptionerSpec:
    """The spec that the flags describe; raises UsageError when they exclude each other."""
    return settings(CaptionerSpec, vars(options))


def settings(kind: Callable[..., T], values: Mapping[str, Any], *, shown: Mapping[str, str] | None = None) -> T:
    """The dataclass `kind` of those values that it has fields for.

    Raises UsageError for values it refuses, in the user's words: a field is the flag of its name, or as in `shown`.
    """
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    words = {name: "--" + name.replace("_", "-") for name in fields} | dict(shown or {})
    try:
        return kind(**{name: values[name] for name in fields if name in values})
    except ValueError as error:
        told = re.sub(rf"(?<![\w-])({'|'.join(fields)})\b", lambda match: words[match[0]], str(error))
        raise UsageError(told) from error


def _run_caption(options: argparse.Namespace) -> int:
    if options.input is not None and options.prompt is None:
        raise UsageError("--input goes with --prompt, which is missing", hint="give the instruction as --prompt")
    if options.raw_prompt is not None and options.prompt is not None:
        raise UsageError("--prompt and --raw-prompt exclude each other", hint="give one of them")
    return _answer(options, instruction=options.prompt, raw=options.raw_prompt, choices=None)


def _run_ask(options: argparse.Namespace) -> int:
    return _answer(options, instruction=options.question, raw=None, choices=options.choices)


def _answer(
    options: argparse.Namespace, *, instruction: str | None, raw: str | None, choices: tuple[str, ...] | None
) -> int:
    spec = spec_from(options)
    sampling = settings(SamplingParams, vars(options))

    from app.answering import Job, Question, run_job

    return run_job(
        Job(
            spec=spec,
            pictures=tuple(options.pictures),
            recursive=options.recursive,
            question=Question(instruction=instruction, input=options.input, raw=raw, choices=choices),
            sampling=sampling,
            out=options.out,
            format=options.format,
            profile=options.profile,
            quiet=options.quiet,
        )
    )


def _run_convert(options: argparse.Namespace) -> int:
    if options.llama_dir is None or options.adapter is None:
        raise UsageError(
            "convert needs --llama-dir and --adapter", hint="and --clip, unless the adapter's file holds CLIP itself"
        )
    from app.bundle import convert
    from llm.runtime.backend import DTYPES

    if options.dtype not in DTYPES:
        raise UsageError(f"No dtype named `{options.dtype}`", hint=f"pass one of {', '.join(DTYPES)} as --dtype")
    bundle = convert(_sources(options), options.out, dtype=DTYPES[options.dtype], overwrite=options.force)
    num_bytes = sum(file.stat().st_size for file in Path(bundle).iterdir())
    print(f"wrote `{bundle}`, {num_bytes / 1e6:,.1f} MB in {options.dtype}", file=sys.stderr)
    return Exit.OK


def _run_quantize(options: argparse.Namespace) -> int:
    from app.quantised_model import QuantiseJob, quantise_bundle

    bundle = quantise_bundle(settings(QuantiseJob, vars(options)))
    num_bytes = sum(file.stat().st_size for file in bundle.iterdir())
    print(f"wrote `{bundle}`, {num_bytes / 1e6:,.1f} MB in {options.precision}", file=sys.stderr)
    return Exit.OK


def _run_export_onnx(options: argparse.Namespace) -> int:
    if options.llama_dir is not None and options.adapter is None:
        raise UsageError("--llama-dir holds no encoder: it is in --adapter, which is missing")
    from app.exporting import EncoderSources, OnnxJob, run_export_onnx

    values = {**vars(options), "pictures": tuple(options.pictures), "sources": settings(EncoderSources, vars(options))}
    run_export_onnx(settings(OnnxJob, values))
    return Exit.OK


def _run_export_om(options: argparse.Namespace) -> int:
    from app.exporting_om import OmJob, run_export_om

    values = {**vars(options), "atc_flags": tuple(options.atc_flags)}
    run_export_om(settings(OmJob, values, shown={"atc_flags": "--atc-flag", "onnx": "FILE.onnx"}))
    return Exit.OK


def _run_serve(options: argparse.Namespace) -> int:
    return _serve(options, has_page=False)


def _run_web(options: argparse.Namespace) -> int:
    return _serve(options, has_page=True)


def _serve(options: argparse.Namespace, *, has_page: bool) -> int:
    spec = spec_from(options)
    limits = settings(ServiceLimits, vars(options))
    from app.serving import ServeJob, run_serve

    values = {
        **vars(options),
        "host_names": tuple(options.host_names),
        "allowed_hosts": tuple(options.allowed_hosts),
    }
    return run_serve(settings(ServeJob, {**values, "spec": spec, "limits": limits, "has_page": has_page}))


def _run_bench(options: argparse.Namespace) -> int:
    spec = spec_from(options)
    from app.bench import BenchJob, run_bench
    from app.bench_report import check_plot, format_table, write_plot

    # What was not given is left to the job.
    values = {name: value for name, value in vars(options).items() if name != "question" or value is not None}
    job = settings(BenchJob, {**values, "spec": spec})
    if options.out is not None and not Path(options.out).absolute().parent.is_dir():
        raise UsageError(f"The folder of `{options.out}` does not exist")
    if options.plot is not None:
        check_plot(options.plot)
    tell = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    result = run_bench(job, tell=tell)
    as_json = json.dumps(result.to_dict(), indent=1)
    if options.out is not None:
        Path(options.out).write_text(as_json + "\n", encoding="utf-8")
    if options.plot is not None:
        write_plot(result, options.plot)
    print(as_json if options.json else format_table(result))
    return Exit.OK


def _sources(options: argparse.Namespace) -> "ModelSources":
    from app.checkpoints import ModelSources

    return settings(ModelSources, vars(options))


def _run_doctor(options: argparse.Namespace) -> int:
    if options.environment and (named := _model_flags(options)):
        goes = "goes" if len(named) == 1 else "go"
        raise UsageError(f"--environment looks at the installation only, and {', '.join(named)} {goes} with a model")
    if options.encoder is None and options.encoder_device is not None:
        raise UsageError("--encoder-device goes with --encoder, which is missing")
    # What `caption` would refuse; what --vision needs may be asked about before an encoder is exported.
    spec = settings(CaptionerSpec, vars(options) | ({"vision": None} if options.encoder is None else {}))
    from app.checkup import run_checkup
    from app.environment import is_device, om_device, uses_of

    if not is_device(spec.device):
        raise UsageError(f"No kind of device named `{spec.device}`", hint=f"pass {_DEVICE_KINDS} as --device")
    uses = uses_of(device=spec.device, vision=options.vision or spec.vision_kind)
    if options.environment:
        return run_checkup(None, uses=uses)
    from app.encoder_doctor import EncoderQuestion
    from app.resources import embedded_model

    bundle = str(embedded_model()) if spec.model is None else spec.model
    encoder = None if spec.encoder is None else EncoderQuestion(spec=spec, beside=om_device(spec.device))
    target = bundle if spec.llama_dir is None else _sources(options)
    return run_checkup(target, uses=uses, encoder=encoder, precision=spec.precision)


def _model_flags(options: argparse.Namespace) -> list[str]:
    """The flags of a model, and of its encoder, that were given."""
    values = vars(options)
    fields = [field for field in dataclasses.fields(CaptionerSpec) if field.name not in ("device", "vision")]
    given = [field.name for field in fields if field.name in values and values[field.name] != field.default]
    return ["--" + name.replace("_", "-") for name in given]


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"llama-adapter {version('llama-adapter')}")
        except PackageNotFoundError:
            print("llama-adapter (run from a checkout, not installed)")
        parser.exit()
