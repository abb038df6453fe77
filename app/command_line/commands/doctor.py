"""`doctor`."""

import argparse
import dataclasses
from contextlib import suppress

from llama_adapter.app.command_line.flags import DEVICES
from llama_adapter.app.command_line.values import refuse_without, settings
from llama_adapter.app.models.sight import refuse_encoder
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.runtime.device_names import split_device
from llama_adapter.runtime.errors import CheckpointError, UsageError


def run_doctor(options: argparse.Namespace) -> int:
    if options.plan is not None:
        return _run_plan(options)
    refuse_without("--plan", options, "devices", "device_memory", "batch_size", "json")
    if options.environment and (named := _model_flags(options)):
        goes = "goes" if len(named) == 1 else "go"
        raise UsageError(f"--environment looks at the installation only, and {', '.join(named)} {goes} with a model")
    if options.encoder is None and options.decoder is None:
        refuse_without("--encoder", options, "encoder_device", "provider_option", "provider_config")
    # Checks what `caption` would refuse. --vision may be checked before an encoder is exported, so it is left out then.
    values = (
        vars(options)
        | {"batch_size": CaptionerSpec().batch_size}
        | ({"vision": None} if options.encoder is None else {})
    )
    spec = settings(CaptionerSpec, values)
    with suppress(CheckpointError):  # a finding
        refuse_encoder(spec)
    from llama_adapter.app.command_line.doctor.command import run_checkup
    from llama_adapter.app.command_line.doctor.environment import uses_of

    try:
        split_device("cpu" if spec.device == AUTO else spec.device)
    except ValueError:
        raise UsageError(f"No kind of device named `{spec.device}`", hint=f"pass {DEVICES} as --device") from None
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
    if options.plan:
        names["clip"], options.clip = options.clip, None
    given = {name: value for name, value in names.items() if value is not None}
    spec = settings(CaptionerSpec, vars(options) | {"batch_size": CaptionerSpec().batch_size, "vision": None})
    job = settings(PlanJob, {"spec": spec, "size": options.plan, **given}, shown={"num_rows": "--batch-size"})
    return run_plan(job, as_json=options.json)


def _model_flags(options: argparse.Namespace) -> list[str]:
    """The flags of model and encoder that the command line or file gives.

    Environment variables are left out: they may be meant for other commands.
    """
    fields = {field.name for field in dataclasses.fields(CaptionerSpec)} - {"device", "vision"}
    given = (one for one in options.effective if one.setting.dest in fields and one.kind in ("flag", "file"))
    return [one.name for one in given]
