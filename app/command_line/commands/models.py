"""`convert`, `quantize` and `pack`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_adapter.app.command_line.model_flags import SPEC, add_model
from llama_adapter.app.command_line.parser import Parser, command, default
from llama_adapter.app.command_line.values import holding_out, settings
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.schemes import PRECISIONS, QUANTISED
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted
from llama_adapter.runtime.terminal.stderr_lines import say

if TYPE_CHECKING:
    from llama_adapter.app.models.quantised_model import QuantiseJob

_CONVERT = """\
Read LLaMA, adapter and CLIP as they were downloaded, check that they fit together, and write them as one bundle that
loads fast: `--model BUNDLE` in the other commands. Then caption a sample picture with it, and store the answer in the
bundle, so that `doctor` can check it.

With --tensor-parallel the decoder is split into a file for each rank, and a machine needs only the files of its ranks.
A bundle of any precision can be split too. With --lora, LoRA of Hugging Face PEFT is merged into the weights.

  llama-adapter convert --llama-dir LLaMA --llama-type 65B --adapter ADAPTER.pth --tensor-parallel 8 --out SPLIT
  llama-adapter convert --model BUNDLE-int8 --tensor-parallel 2 --out BUNDLE-int8-split
  llama-adapter convert --model BUNDLE --lora LORA --lora OTHER=0.5 --out MERGED
"""

_QUANTIZE = """\
Round the weights of all linear layers of a bundle: to 8 bits, with a scale for each output, or to 4 bits, with a scale
for each 32 inputs. That is half or a quarter of float16 on disk. A CPU with the kernels computes faster with fewer bits
(see `doctor --environment`); elsewhere weights are widened at load. docs/bits.md has the accuracy. With --calibrate,
4-bit weights are rounded so that the outputs of layers change little for pictures like those given. This about halves
the error at the same size. 8-bit weights are the same with --calibrate, and the bundle gets a scale of the inputs of
each layer of the decoder. --operators w8a8 then uses it for all rows (docs/devices.md).

  llama-adapter quantize --model BUNDLE --out BUNDLE-int8
  llama-adapter quantize --model BUNDLE --out BUNDLE-int4 --precision int4 --calibrate PICTURES
  llama-adapter quantize --model BUNDLE --out BUNDLE-w8a8 --precision int8 --calibrate PICTURES
"""


_PACK = """\
Store the weights of a bundle in the layout that the kernels of this processor use. Such a bundle is mapped into memory
and used as it is: it starts in seconds, and processes share its memory. Other processors and devices take it too, but
convert the layout at every start; the values are the same. `doctor --model` shows the layout.

  llama-adapter pack --model BUNDLE-int8 --out BUNDLE-int8-packed
  llama-adapter pack --model BUNDLE --precision int4 --out BUNDLE-int4-packed
"""


def add_convert(commands: Any) -> None:
    """Add `convert`."""
    text = "convert checkpoints to a bundle"
    command(commands, "convert", _run_convert, declare=_declare_convert, help=text, description=_CONVERT)


def _declare_convert(convert: Parser) -> None:
    add_model(convert, bundle_help="bundle to split, with --tensor-parallel, or to merge, with --lora")
    output = convert.add_argument_group("output", section="output")
    output.add_argument("--out", metavar="BUNDLE", required=True, help="folder to write")
    output.add_argument(
        "--dtype",
        key="stored_dtype",
        metavar="T",
        default="float16",
        help=default("precision to store; a bundle of --model keeps its own"),
    )
    output.add_argument(
        "--tensor-parallel",
        key="stored_ranks",
        dest="num_ranks",
        metavar="N",
        type=int,
        default=1,
        help=default("ranks that will share the decoder; each gets a file (docs/tensor-parallel.md)"),
    )
    output.add_argument("--force", action="store_true", help="replace an existing bundle")
    output.add_argument(
        "--no-known-answer", action="store_true", help="do not load the model to store an answer for `doctor`"
    )


def add_quantize(commands: Any) -> None:
    text = "make an 8-bit or 4-bit bundle"
    command(commands, "quantize", _run_quantize, declare=_declare_quantize, help=text, description=_QUANTIZE)


def _declare_quantize(quantize: Parser) -> None:
    quantize.add_argument(
        "--model", section="model", metavar="BUNDLE", help="bundle of floats (default: the embedded model)"
    )
    output = quantize.add_argument_group("output", section="output")
    output.add_argument("--out", metavar="BUNDLE", required=True, help="folder to write")
    output.add_argument(
        "--precision",
        key="stored_precision",
        choices=QUANTISED,
        default="int8",
        help=default("number format of the weights"),
    )
    output.add_argument("--force", action="store_true", help="replace an existing bundle")
    calibration = quantize.add_argument_group("calibration", section="input")
    calibration.add_argument(
        "--calibrate",
        key="calibration_pictures",
        metavar="PICTURES",
        nargs="+",
        help="a few hundred pictures like those of the job: files, folders, patterns or tar archives. The model "
        "answers for each; it takes minutes to hours",
    )
    calibration.add_argument(
        "--questions",
        key="calibration_questions",
        metavar="FILE",
        help="questions of the job, asked about the pictures in turn: .txt with one per line, or a table (CSV, JSON, "
        "Parquet) with columns question, input, choices (default: the caption prompt)",
    )


def add_pack(commands: Any) -> None:
    text = "make a bundle that starts at once on this processor"
    command(commands, "pack", _run_pack, declare=_declare_pack, help=text, description=_PACK)


def _declare_pack(pack: Parser) -> None:
    pack.add_argument("--model", section="model", metavar="BUNDLE", help="bundle (default: the embedded model)")
    output = pack.add_argument_group("output", section="output")
    output.add_argument("--out", metavar="BUNDLE", required=True, help="folder to write")
    output.add_argument(
        "--precision",
        key="packed_precision",
        choices=tuple(PRECISIONS),
        help="number format of the linear layers' weights (default: as stored)",
    )
    output.add_argument(
        "--dtype",
        key="packed_dtype",
        metavar="T",
        default="auto",
        help=default("float32 or bfloat16, for all other values; auto: what the CPU computes best"),
    )
    output.add_argument("--force", action="store_true", help="replace an existing bundle")


@terminated_as_interrupted()
@holding_out
def _run_pack(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle

    made = pack_bundle(settings(PackJob, vars(options)))
    return _tell(made.folder, f"{made.numbers}, packed in {made.layout}")


@terminated_as_interrupted()
@holding_out
def _run_convert(options: argparse.Namespace) -> int:
    if options.num_ranks < 1:
        raise UsageError(f"--tensor-parallel must be at least 1, got {options.num_ranks}")
    if options.model is not None:
        return _run_split(options)
    if options.llama_dir is None or options.adapter is None:
        raise UsageError(
            "convert needs --llama-dir and --adapter",
            hint="and --clip, unless the adapter's file holds CLIP itself; or, for a bundle, --model with "
            "--tensor-parallel to split it, or --lora to merge",
        )
    from llama_adapter.app.models.bundle import convert
    from llama_adapter.app.models.checkpoints import ModelSources
    from llama_adapter.runtime.devices import DTYPES

    if options.dtype not in DTYPES:
        raise UsageError(f"No dtype named `{options.dtype}`", hint=f"pass one of {', '.join(DTYPES)} as --dtype")
    sources = settings(ModelSources, vars(options))
    numbers = {"dtype": DTYPES[options.dtype], "num_ranks": options.num_ranks}
    bundle = convert(sources, options.out, **numbers, overwrite=options.force, tell=say)
    code = _tell(bundle, options.dtype, num_ranks=options.num_ranks)
    if not options.no_known_answer:
        _answer(bundle)
    return code


def _run_split(options: argparse.Namespace) -> int:
    for name in ("llama_dir", "llama_type", "adapter", "clip", "visual_heads", "channel_order", "context"):
        if getattr(options, name) not in (None, SPEC.channel_order):
            hint = "name a bundle, which keeps its own context and channel order, or checkpoints"
            raise UsageError(f"--model does not go with --{name.replace('_', '-')}", hint=hint)
    if options.num_ranks == 1 and not options.lora:
        raise UsageError(
            "convert --model splits a bundle, and --tensor-parallel is missing",
            hint="for 2 ranks pass 2; with --lora a bundle is merged",
        )
    from llama_adapter.app.models.bundle_manifest import read_manifest, stored_precision
    from llama_adapter.app.models.split_bundle import split_bundle

    given = {"num_ranks": options.num_ranks, "lora": options.lora, "overwrite": options.force}
    bundle = split_bundle(options.model, options.out, **given, tell=say)
    code = _tell(bundle, stored_precision(read_manifest(bundle)), num_ranks=options.num_ranks)
    if options.lora and options.num_ranks == 1 and not options.no_known_answer:
        _answer(bundle)
    return code


def _answer(bundle: Path) -> None:
    from llama_adapter.app.command_line.doctor.model import write_known_answer

    try:
        say(f"known answer for `doctor`: {write_known_answer(bundle)!r}")
    except Exception as error:  # not an error: the bundle is written, and this machine may be too small to run it
        say(f"note: the bundle has no known answer for `doctor`: {describe(error).sentence}")


@terminated_as_interrupted()
@holding_out
def _run_quantize(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle

    job = settings(QuantiseJob, vars(options))
    if options.calibrate:
        return _tell(_calibrated(job, options), f"{options.precision}, calibrated")
    if options.questions is not None:
        raise UsageError("--questions goes with --calibrate, which is missing")
    return _tell(quantise_bundle(job), options.precision)


def _calibrated(job: "QuantiseJob", options: argparse.Namespace) -> Path:
    from llama_adapter.app.captioning.tasks.question import Question
    from llama_adapter.app.jobs.questions import complete
    from llama_adapter.app.learning.quantising.samples import SampleSpec, quantise_calibrated
    from llama_adapter.app.pictures.inputs import read_question_sheet

    sheet = () if options.questions is None else read_question_sheet(options.questions)
    questions = tuple(complete(Question(), question) for question in sheet) or (Question(),)
    return quantise_calibrated(job, SampleSpec(pictures=tuple(options.calibrate), questions=questions))


def _tell(bundle: Path, numbers: str, *, num_ranks: int = 1) -> int:
    num_bytes = sum(file.stat().st_size for file in bundle.iterdir())
    ranks = f", split for {num_ranks} ranks" if num_ranks > 1 else ""
    say(f"wrote `{bundle}`, {num_bytes / 1e6:,.1f} MB in {numbers}{ranks}")
    return ExitCode.OK
