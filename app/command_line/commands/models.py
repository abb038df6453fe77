"""`get`, `convert`, `quantize` and `pack`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llama_adapter.app.command_line.values import holding_out, refuse_without, settings, spec_from
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_name

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


@terminated_as_interrupted()
def run_get(options: argparse.Namespace) -> int:
    from llama_adapter.app.models.named.getting import obtain
    from llama_adapter.app.models.named.hub_source import SCHEME
    from llama_adapter.app.models.named.located import parts_of

    if options.list:
        if options.names or options.check:
            raise UsageError("--list goes without names and --check")
        return _list()
    if not options.names:
        raise UsageError("get needs a name", hint="`llama-adapter get --list` lists the names")
    wanted = {name: parts_of(name) for name in options.names}
    code = ExitCode.OK
    for name, parts in wanted.items():
        if options.check:
            for weights in parts.values():
                for checked in weights.source.check():
                    print(f"{checked.fault or 'right'}: {shown_name(checked.path)}")
                    code = ExitCode.FAILED if checked.fault else code
        else:
            found = obtain(parts, name=name, consent="yes" if options.yes else "ask", tell=say)
            for kind, path in found.items():
                print(f"{kind:8}{shown_name(path)}")
            if name.startswith(SCHEME):
                _make_bundle(found["model"])
    return code


def _make_bundle(place: Path) -> None:
    """Make a bundle of a LLaMA, in the number format that fits the memory, and print its path."""
    from llama_adapter.app.models.named.ready import ready_texts
    from llama_adapter.app.models.spec import CaptionerSpec

    try:
        if (bundle := ready_texts(place, CaptionerSpec(), tell=say)) is not None:
            print(f"{'bundle':8}{shown_name(bundle)}")
    except LlamaAdapterError as error:  # the weights are there, and another machine may take them
        say(f"note: there is no bundle of it: {describe(error).sentence}")


def _list() -> int:
    from llama_adapter.app.models.named.catalogue import KINDS, read_catalogue
    from llama_adapter.app.models.named.source import shown_bytes

    for kind in KINDS:
        print(f"{kind}:")
        for name, part in read_catalogue()[kind].items():
            state = "here" if part.source.here() else "on request" if part.asks else ""
            size = shown_bytes(part.bytes) if part.bytes else "?"
            print(f"  {name:22}{size:>8}  {state:10}  {part.licence}: {part.home}")
    return ExitCode.OK
