"""`train`."""

import argparse
from typing import TYPE_CHECKING, Any

from llama_adapter.app.command_line.flags import add_flags, command, fields_of
from llama_adapter.app.command_line.parser import Parser
from llama_adapter.app.command_line.values import refuse_without, settings
from llama_adapter.app.models.parallel.launch import quieten_torch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from llama_adapter.app.learning.training.job import TrainJob


def add_train(commands: Any) -> None:
    """Add `train`."""
    command(commands, "train", _run_train, declare=_declare)


def _declare(train: Parser) -> None:
    # Other commands build this module's parser without its flags, and importing their defaults takes 5 ms.
    from llama_adapter.app.learning.training.job import KINDS, LEARNING_RATES, Optimisation, TrainingChoice, TrainJob

    job = TrainJob(data=("DATA",), out="OUT.pth")
    defaults = fields_of(Optimisation(), job, TrainingChoice()) | {"visual_heads": None}
    texts = {
        "sets": "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in KINDS.items()),
        "rates": ", ".join(f"{kind} {rate:g}" for kind, rate in LEARNING_RATES.items()),
    }
    add_flags(train, "train", defaults=defaults, texts=texts)


_OF_NEW = ("num_queries", "adapter_layers", "visual_width", "visual_depth")
_PLAN_ONLY = ("devices", "tokens", "device_type", "device_tflops", "device_bandwidth", "json")


def _run_train(options: argparse.Namespace) -> int:
    quieten_torch()
    if options.plan is not None:
        return _run_plan(options)
    refuse_without("--plan", options, *_PLAN_ONLY)
    missing = [name for name, value in (("DATA", options.data), ("--out", options.out)) if not value]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")
    from llama_adapter.runtime.settings.sources import to_run_again

    job = _job(options, to_run_again(options.effective, command="train"))  # usage errors come before torch is imported
    from llama_adapter.app.learning.training.run import train

    return train(job)


def _job(options: argparse.Namespace, given: dict[str, Any]) -> "TrainJob":
    from llama_adapter.app.learning.training.job import Optimisation, TrainingChoice, TrainJob

    values = vars(options)
    is_new = options.llama_dir is not None and options.adapter is None
    heads = TrainingChoice().visual_heads if options.visual_heads is None else options.visual_heads
    choice = settings(TrainingChoice, {**values, "clip": options.clip if is_new else None, "visual_heads": heads})
    spec = settings(
        CaptionerSpec, {**values, "batch_size": 8} | ({"clip": None, "visual_heads": None} if is_new else {})
    )
    sizes = [one for one in options.effective if one.setting.dest in _OF_NEW]  # a run's `settings.yaml` has them all
    given_sizes = [one.name for one in sizes if one.kind in ("flag", "variable") or one.value != one.setting.default]
    if given_sizes and not is_new:
        raise UsageError(
            f"only a new adapter takes a size: {', '.join(given_sizes)}",
            hint="an adapter or bundle that is trained further has its own",
        )
    made = {"spec": spec, "choice": choice, "optimisation": settings(Optimisation, values), "settings": given}
    shown = {"save_every_s": "--save-every", "timeout_s": "--rank-timeout"}
    return settings(TrainJob, {**values, **made}, shown=shown)


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
        dtype=run_dtype(job, backend, device_type=device_type),
        rates=None
        if rates[0] is None
        else Rates(flops_per_s=rates[0] * 1e12, frozen_flops_per_s=rates[0] * 1e12, bytes_per_s=rates[1] * 1e9),
    )
    try:
        print(run_plan(job, request, backend=backend, as_json=options.json))
    except ValueError as error:
        raise UsageError(str(error).replace("random must", "--plan must")) from None
    return ExitCode.OK
