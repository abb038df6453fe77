"""`doctor`."""

import argparse
import dataclasses
from typing import Any

from llama_adapter.app.command_line.model_flags import SPEC, add_encoder, add_model, add_precision
from llama_adapter.app.command_line.parser import DEVICES, Parser, command, default
from llama_adapter.app.command_line.values import check_adapter, parse_batch_sizes, parse_bytes, settings
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError

_DOCTOR = """\
Check this installation and a model, and say how to fix what is wrong. Without model flags, the embedded model is
checked. Packages that the intended use does not need may be missing. Exit code 0 if everything is right, else 1.

  llama-adapter doctor --plan 65B --devices 4,8 --device-memory 32GB,64GB      will it fit?
"""


def add_doctor(commands: Any) -> None:
    """Add `doctor`."""
    text = "check the installation and a model"
    command(commands, "doctor", _run_doctor, declare=_declare, help=text, description=_DOCTOR)


def _declare(doctor: Parser) -> None:
    add_model(doctor)
    use = doctor.add_argument_group("intended use", "what it needs must be installed", section="computation")
    use.add_argument(
        "--device", metavar="D", default=SPEC.device, help=default(f"{DEVICES}: an NPU, else a GPU, else the CPU")
    )
    add_precision(use)
    add_encoder(use)
    doctor.add_argument(
        "--environment", section="computation", action="store_true", help="only the installation, no model"
    )

    plan = doctor.add_argument_group("memory plan, instead of checking")
    plan.add_argument(
        "--plan",
        metavar="SIZE",
        nargs="?",
        const="",
        help="print memory and least times on this machine, and that of each of several devices, for the model of the "
        "flags or for one of a size: 7B, 13B, 30B, 65B or DIMxLAYERSxHEADSxFFN",
    )
    plan.add_argument(
        "--devices",
        metavar="N,N",
        type=parse_batch_sizes,
        help="numbers of devices to split over, without this machine (default: 1,2,4,8)",
    )
    plan.add_argument(
        "--device-memory", metavar="GB,GB", type=parse_bytes, help="memory of a device (default: 21GB,32GB,64GB)"
    )
    plan.add_argument("--batch-size", metavar="N", type=int, help="rows computed at once (default: 8)")
    plan.add_argument("--json", action="store_true", help="JSON on stdout instead of the table, sizes in bytes")


def _run_doctor(options: argparse.Namespace) -> int:
    if options.plan is not None:
        return _run_plan(options)
    only = {"--devices": options.devices, "--device-memory": options.device_memory, "--batch-size": options.batch_size}
    for flag in (flag for flag, value in {**only, "--json": options.json or None}.items() if value is not None):
        raise UsageError(f"{flag} goes with --plan, which is missing")
    if options.environment and (named := _model_flags(options)):
        goes = "goes" if len(named) == 1 else "go"
        raise UsageError(f"--environment looks at the installation only, and {', '.join(named)} {goes} with a model")
    alone = {"--encoder-device": options.encoder_device, "--provider-option": options.provider_option or None}
    alone["--provider-config"] = options.provider_config
    for flag, value in alone.items():
        if options.encoder is None and options.decoder is None and value is not None:
            raise UsageError(f"{flag} goes with --encoder, which is missing")
    # Checks what `caption` would refuse. --vision may be checked before an encoder is exported, so it is left out then.
    values = vars(options) | {"batch_size": SPEC.batch_size} | ({"vision": None} if options.encoder is None else {})
    spec = check_adapter(settings(CaptionerSpec, values))
    from llama_adapter.app.command_line.doctor.command import run_checkup
    from llama_adapter.app.command_line.doctor.environment import is_device, uses_of

    if not is_device(spec.device):
        raise UsageError(f"No kind of device named `{spec.device}`", hint=f"pass {DEVICES} as --device")
    vision = options.vision or spec.vision_kind
    uses = uses_of(device=spec.device, vision=vision, has_decoder=spec.decoder is not None)
    return run_checkup(None if options.environment else spec, uses=uses)


def _run_plan(options: argparse.Namespace) -> int:
    if options.environment:
        raise UsageError("--environment and --plan exclude each other: each prints something else than findings")
    if options.plan and (named := {"--model", "--llama-dir"} & set(_model_flags(options))):
        raise UsageError(f"--plan {options.plan} is a size, and {named.pop()} names a model too: leave one out")
    from llama_adapter.app.command_line.doctor.planning import run_plan
    from llama_adapter.app.models.plan import PlanJob

    names = {"num_rows": options.batch_size, "num_devices": options.devices, "device_bytes": options.device_memory}
    given = {name: value for name, value in names.items() if value is not None}
    spec = settings(CaptionerSpec, vars(options) | {"batch_size": SPEC.batch_size, "vision": None})
    job = settings(PlanJob, {"spec": spec, "size": options.plan, **given}, shown={"num_rows": "--batch-size"})
    return run_plan(job, as_json=options.json)


def _model_flags(options: argparse.Namespace) -> list[str]:
    """The flags of model and encoder that the command line or file gives.

    Environment variables are left out: they may be meant for other commands.
    """
    fields = {field.name for field in dataclasses.fields(CaptionerSpec)} - {"device", "vision"}
    given = (one for one in options.effective if one.setting.dest in fields and one.kind in ("flag", "file"))
    return [one.name for one in given]
