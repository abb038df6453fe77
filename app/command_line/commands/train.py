"""`train`."""

import argparse
from typing import Any

from llama_adapter.app.command_line.model_flags import SPEC, add_model, add_picture_reading, add_sample_fields
from llama_adapter.app.command_line.parser import DEVICES, Parser, command, default
from llama_adapter.app.command_line.values import parse_batch_sizes, parse_text, settings
from llama_adapter.app.learning.training.job import KINDS, LEARNING_RATES, Optimisation, TrainingChoice, TrainJob
from llama_adapter.app.models.parallel.launch import quieten_torch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import ExitCode, UsageError

_TRAIN = """\
Train an adapter on labelled pictures or texts, over a frozen LLaMA. DATA are folders of pictures by class, tables, tar
archives or known sets (docs/labelled-data.md). A tenth of the pictures is held out for validation, and a tenth for the
test. The results are OUT.pth and a folder OUT.training with curves, scores and a model card.

  llama-adapter train photos --out animals.pth              a folder for each class
  llama-adapter train questions.jsonl --out mine.pth --sets bias,lora
  llama-adapter train photos --out animals.pth --resume     continue after Ctrl-C
  torchrun --nproc-per-node 8 -m llama_adapter train ...    on several devices

Ctrl-C ends the run after the current step and keeps the best weights so far; the exit code is then 130.
"""
_JOB = TrainJob(data=("DATA",), out="OUT.pth")
_OPTIMISATION = Optimisation()
_CHOICE = TrainingChoice()


def add_train(commands: Any) -> None:
    """Add `train`."""
    text = "train an adapter on your own pictures"
    command(commands, "train", _run_train, declare=_declare, help=text, description=_TRAIN)


def _declare(train: Parser) -> None:
    train.add_argument(
        "data", metavar="DATA", nargs="*", section="input", first=True, help="labelled pictures or texts (required)"
    )
    output = train.add_argument_group("output", section="output")
    output.add_argument("--out", metavar="FILE.pth", first=True, help="the adapter to write")
    output.add_argument("--force", action="store_true", help="replace the results of an earlier run")
    output.add_argument("--resume", action="store_true", first=True, help="continue from the last checkpoint")
    output.add_argument(
        "--bundle", action="store_true", help="also write a bundle; always done if the model is a bundle"
    )
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_model(train)
    _add_data(train.add_argument_group("data", section="input"))
    _add_choice(train.add_argument_group("what is trained", section="training"))
    _add_optimisation(train.add_argument_group("optimisation", section="training"))
    _add_run(train.add_argument_group("run", section="training"))
    _add_plan(
        train.add_argument_group("plan, instead of training"),
        details=train.add_argument_group("what is planned", section="profiling"),
    )
    compute = train.add_argument_group("computation", section="computation")
    compute.add_argument(
        "--device",
        metavar="D",
        default=SPEC.device,
        first=True,
        help=default(f"{DEVICES}: an NPU, else a GPU, else the CPU"),
    )
    compute.add_argument(
        "--dtype",
        metavar="T",
        default=SPEC.dtype,
        help=default(
            "dtype of frozen weights and activations: float32, bfloat16 or float16; auto: float32 on a CPU, else "
            "bfloat16. Trained parameters are float32"
        ),
    )
    add_picture_reading(compute, hidden=True)


def _add_data(group: Any) -> None:
    group.add_argument(
        "--question",
        section="prompt",
        metavar="TEXT",
        type=parse_text,
        first=True,
        help="question for examples without one (default: for classes, it lists them; for captions, the model's"
        " prompt)",
    )
    group.add_argument(
        "--picture-folder",
        dest="pictures",
        key="picture_folder",
        metavar="FOLDER",
        help="pictures of a known set (default: where they usually lie)",
    )
    add_sample_fields(group)
    group.add_argument(
        "--validation", metavar="SHARE", type=float, default=_JOB.validation, help=default("share of the pictures")
    )
    group.add_argument(
        "--test",
        metavar="SHARE",
        type=float,
        default=_JOB.test,
        help=default("share of the pictures, for the final scores"),
    )
    group.add_argument(
        "--most-unreadable",
        metavar="SHARE",
        type=float,
        default=_JOB.most_unreadable,
        help=default("share of the pictures that may be unreadable; these are named and left out"),
    )
    group.add_argument(
        "--encoded",
        dest="cache",
        key="encoded",
        metavar="FOLDER",
        help="folder for encoded pictures (default: in the user's cache folder; without one, beside --out)",
    )


def _add_choice(group: Any) -> None:
    meanings = "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in KINDS.items())
    group.add_argument(
        "--sets",
        metavar="SET,...",
        type=lambda text: tuple(text.split(",")),
        separator=",",
        default=",".join(_CHOICE.sets),
        first=True,
        help=default(f"sets of parameters: {meanings}"),
    )
    group.add_argument(
        "--lora-rank", metavar="N", type=int, default=_CHOICE.lora_rank, help=default("rank of new factors")
    )
    new = "of a new adapter, for a LLaMA without one"
    group.add_argument(
        "--num-queries", metavar="N", type=int, default=_CHOICE.num_queries, help=default(f"queries {new}")
    )
    group.add_argument("--adapter-layers", metavar="N", type=int, help=f"layers {new} (default: all but the first)")
    for name, what in (("width", "width"), ("depth", "number")):
        group.add_argument(
            f"--visual-{name}",
            metavar="N",
            type=int,
            default=getattr(_CHOICE, f"visual_{name}"),
            help=default(f"{what} of the visual blocks {new}"),
        )


def _add_optimisation(group: Any) -> None:
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in LEARNING_RATES.items())
    group.add_argument(
        "--epochs",
        metavar="N",
        type=float,
        first=True,
        help="passes over the data (default: 3, or enough for 300 steps)",
    )
    group.add_argument(
        "--batch-size",
        key="step_examples",
        metavar="N",
        type=int,
        default=_OPTIMISATION.batch_size,
        first=True,
        help=default("examples of a step, all devices together"),
    )
    group.add_argument(
        "--rows", metavar="N", type=int, help="examples that a device computes at once (default: its share of a step)"
    )
    group.add_argument(
        "--lr",
        metavar="X",
        type=float,
        first=True,
        help=f"highest learning rate (default: {rates} for 7B; more for narrower models)",
    )
    for flag, what in (
        ("warmup", "share of the steps over which the learning rate rises"),
        ("final-lr", "share of the highest learning rate at the end"),
        ("weight-decay", "weight decay of matrices"),
        ("max-norm", "the gradient is scaled down to this norm; 0: no limit"),
    ):
        group.add_argument(
            f"--{flag}",
            metavar="X",
            type=float,
            default=getattr(_OPTIMISATION, flag.replace("-", "_")),
            help=default(what),
        )
    group.add_argument(
        "--skip",
        metavar="N",
        type=int,
        default=_OPTIMISATION.skip,
        help=default("steps that may be skipped because their loss is not finite, before the run stops"),
    )


def _add_run(group: Any) -> None:
    group.add_argument("--seed", section="generation", metavar="N", type=int, default=_JOB.seed, help=default())
    group.add_argument(
        "--checkpointing",
        action="store_true",
        help="compute activations twice, which takes less memory and a third more time",
    )
    group.add_argument(
        "--evaluate-every",
        metavar="STEPS",
        type=int,
        help="steps between evaluations (default: an epoch, and at most 20 evaluations in a run)",
    )
    group.add_argument(
        "--score",
        choices=("auto", "answers", "loss"),
        default=_JOB.score,
        help=default(
            "score that early stopping uses; auto: answers, unless the model is large or has many choices to compare"
        ),
    )
    group.add_argument(
        "--patience",
        metavar="N",
        type=int,
        default=_JOB.patience,
        help=default("evaluations without improvement before the run ends; 0: it never ends early"),
    )
    group.add_argument(
        "--save-every",
        dest="save_every_s",
        key="save_every",
        metavar="S",
        type=float,
        default=_JOB.save_every_s,
        help=default("seconds between checkpoints; evaluations write one too"),
    )
    group.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        default=_JOB.parallel,
        help=default("ranks of torchrun: ddp, each has the whole model; fsdp, each has a part of every parameter"),
    )
    group.add_argument(
        "--rank-timeout",
        dest="timeout_s",
        key="rank_timeout",
        metavar="S",
        type=float,
        default=_JOB.timeout_s,
        help=default("seconds that a rank waits for the others before all ranks end"),
    )


def _add_plan(group: Any, *, details: Any) -> None:
    group.add_argument(
        "--plan",
        metavar="SIZE",
        nargs="?",
        const="",
        help="print memory and time of a step for the model of the flags, or for one of a size: 160M, 1B, 7B, 13B, "
        "30B, 65B or DIMxLAYERSxHEADSxFFN",
    )
    details.add_argument("--devices", metavar="N,N", type=parse_batch_sizes, help="numbers of devices (default: 1,8)")
    details.add_argument("--tokens", metavar="N", type=int, help="tokens of a row (default: the context)")
    details.add_argument("--device-type", metavar="TYPE", help="cpu, cuda or npu (default: that of --device)")
    details.add_argument(
        "--device-tflops", metavar="X", type=float, help="rate of matrix products (default: measured on this machine)"
    )
    details.add_argument(
        "--device-bandwidth", metavar="GB/S", type=float, help="memory bandwidth (default: measured on this machine)"
    )
    details.add_argument("--json", section="output", action="store_true", help="JSON on stdout instead of the table")


_PLAN_ONLY = ("devices", "tokens", "device_type", "device_tflops", "device_bandwidth")


def _run_train(options: argparse.Namespace) -> int:
    quieten_torch()
    if options.plan is not None:
        return _run_plan(options)
    given = [name for name in _PLAN_ONLY if getattr(options, name) is not None] + ["json"] * options.json
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} goes with --plan, which is missing")
    missing = [name for name, value in (("DATA", options.data), ("--out", options.out)) if not value]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")
    from llama_adapter.runtime.settings.sources import to_run_again

    return _train(_job(options, to_run_again(options.effective, command="train")))


def _job(options: argparse.Namespace, given: dict[str, Any]) -> TrainJob:
    values = vars(options)
    is_new = options.llama_dir is not None and options.adapter is None
    choice = settings(
        TrainingChoice, {**values, "clip": options.clip if is_new else None, "visual_heads": _heads(options)}
    )
    spec = settings(
        CaptionerSpec, {**values, "batch_size": 8} | ({"clip": None, "visual_heads": None} if is_new else {})
    )
    if not is_new and any(one.kind != "default" for one in options.effective if one.setting.dest in _OF_NEW):
        raise UsageError(
            "--num-queries, --adapter-layers, --visual-width and --visual-depth are sizes of a new adapter",
            hint="an adapter or bundle that is trained further has its own",
        )
    optimisation = settings(Optimisation, values)
    shown = {"save_every_s": "--save-every", "timeout_s": "--rank-timeout"}
    return settings(
        TrainJob,
        {
            **values,
            "data": tuple(options.data),
            "spec": spec,
            "choice": choice,
            "optimisation": optimisation,
            "settings": given,
        },
        shown=shown,
    )


_OF_NEW = ("num_queries", "adapter_layers", "visual_width", "visual_depth")


def _heads(options: argparse.Namespace) -> int:
    return _CHOICE.visual_heads if options.visual_heads is None else int(options.visual_heads)


def _train(job: TrainJob) -> int:
    from llama_adapter.app.learning.training.run import train

    return train(job)


def _run_plan(options: argparse.Namespace) -> int:
    if options.data:
        raise UsageError("--plan needs no DATA: --tokens tells how long its rows are")
    rates = (options.device_tflops, options.device_bandwidth)
    if (rates[0] is None) != (rates[1] is None):
        raise UsageError("--device-tflops and --device-bandwidth go together")
    job = _job(argparse.Namespace(**{**vars(options), "data": ["DATA"], "out": "OUT.pth"}), {})
    from llama_adapter.app.learning.training.planning import PlanRequest, Rates, run_plan
    from llama_adapter.app.learning.training.run import run_dtype
    from llama_adapter.runtime.devices import open_backend

    backend = open_backend(options.device)
    device_type = options.device_type or backend.device.type
    request = PlanRequest(
        size=options.plan,
        num_devices=options.devices or PlanRequest().num_devices,
        tokens=options.tokens,
        device_type=device_type,
        dtype=run_dtype(job, backend),
        rates=None
        if rates[0] is None
        else Rates(flops_per_s=rates[0] * 1e12, frozen_flops_per_s=rates[0] * 1e12, bytes_per_s=rates[1] * 1e9),
    )
    try:
        print(run_plan(job, request, backend=backend, as_json=options.json))
    except ValueError as error:
        raise UsageError(str(error).replace("random must", "--plan must")) from None
    return ExitCode.OK
