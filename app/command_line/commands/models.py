"""`convert`, `quantize` and `pack`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llama_adapter.app.command_line.values import holding_out, refuse_without, settings, spec_from
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.terminal.stderr_lines import say

if TYPE_CHECKING:
    from llama_adapter.app.models.quantised_model import QuantiseJob


@holding_out
def run_pack(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.bundle_manifest import read_manifest
    from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle

    made = read_manifest(pack_bundle(settings(PackJob, vars(options))))
    numbers = made["dtype"] if made.precision == FLOAT else made.precision
    return _tell(made.place, f"{numbers}, packed in {made.layout}")


@holding_out
def run_convert(options: argparse.Namespace) -> int:
    if options.num_ranks < 1:
        raise UsageError(f"--tensor-parallel must be at least 1, got {options.num_ranks}")
    if options.model is not None:
        return _run_split(options)
    if options.llama_dir is None:
        raise UsageError(
            "convert needs --llama-dir or --model",
            hint="pictures need --llama-dir, --adapter, and --clip unless the adapter's file holds CLIP; --model is a "
            "LLaMA for texts, or a bundle to split (--tensor-parallel) or to merge (--lora)",
        )
    from llama_adapter.app.models.bundle import convert
    from llama_adapter.runtime.devices import DTYPES

    if options.dtype not in DTYPES:
        raise UsageError(f"No dtype named `{options.dtype}`", hint=f"pass one of {', '.join(DTYPES)} as --dtype")
    spec = spec_from(options, sees_pictures=False)
    numbers = {"dtype": DTYPES[options.dtype], "num_ranks": options.num_ranks}
    bundle = convert(spec, options.out, **numbers, overwrite=options.force, tell=say)
    code = _tell(bundle, options.dtype, num_ranks=options.num_ranks)
    if not options.no_known_answer:
        _answer(bundle)
    return code


def _run_split(options: argparse.Namespace) -> int:
    for name in ("llama_dir", "llama_type", "adapter", "clip", "visual_heads", "channel_order", "context"):
        if getattr(options, name) not in (None, CaptionerSpec().channel_order):
            hint = "name a bundle, which keeps its own context and channel order, or checkpoints"
            raise UsageError(f"--model does not go with --{name.replace('_', '-')}", hint=hint)
    from llama_adapter.app.models.bundle_manifest import read_manifest
    from llama_adapter.app.models.models_by_name import bundle_folder

    if options.num_ranks == 1 and not options.lora and read_manifest(bundle_folder(options.model)):
        raise UsageError(
            "convert --model splits a bundle, and --tensor-parallel is missing",
            hint="for 2 ranks pass 2; with --lora a bundle is merged",
        )
    from llama_adapter.app.models.packed_bundle import split_bundle

    given = {"num_ranks": options.num_ranks, "lora": options.lora, "overwrite": options.force}
    bundle = split_bundle(options.model, options.out, **given, tell=say)
    code = _tell(bundle, read_manifest(bundle).precision, num_ranks=options.num_ranks)
    if options.lora and options.num_ranks == 1 and not options.no_known_answer:
        _answer(bundle)
    return code


def _answer(bundle: Path) -> None:
    from llama_adapter.app.command_line.doctor.model import write_known_answer

    try:
        say(f"known answer for `doctor`: {write_known_answer(bundle)!r}")
    except Exception as error:  # not an error: the bundle is written, and this machine may be too small to run it
        say(f"note: the bundle has no known answer for `doctor`: {describe(error).sentence}")


@holding_out
def run_quantize(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle

    job = settings(QuantiseJob, vars(options))
    if options.calibrate:
        return _tell(_calibrated(job, options), f"{options.precision}, calibrated")
    refuse_without("--calibrate", options, "questions")
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
