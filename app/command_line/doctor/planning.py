"""The command `doctor --plan`."""

import json

from llama_adapter.app.command_line.doctor.this_machine import machine_json, machine_lines, plan_this_machine
from llama_adapter.app.models.plan import (
    USUAL_MEMORY,
    USUAL_NUMBERS,
    PlanJob,
    device_plans,
    plan_json,
    plan_lines,
    planned_model,
)
from llama_adapter.runtime.errors import ExitCode, UsageError


def run_plan(job: PlanJob, *, as_json: bool) -> int:
    """Print the plan; returns the exit code. Raises UsageError for a size that does not exist.

    Unless the job names devices, what this machine can do comes first.
    """
    try:
        model = planned_model(job)
    except ValueError as error:
        raise UsageError(str(error).replace("random must", "--plan must")) from None
    numbers, memory = job.num_devices or USUAL_NUMBERS, job.device_bytes or USUAL_MEMORY
    plans = list(device_plans(model, num_devices=numbers, device_bytes=memory, num_rows=job.num_rows))
    own = None
    if job.num_devices is None and job.device_bytes is None:
        own = plan_this_machine(model, num_rows=job.num_rows)
    if as_json:
        more = {} if own is None else {"this_machine": machine_json(own)}
        print(json.dumps({**plan_json(model, plans, num_rows=job.num_rows), **more}, indent=1))
    else:
        lines = [] if own is None else [*machine_lines(own, num_rows=job.num_rows), ""]
        print(*lines, *plan_lines(model, plans, num_rows=job.num_rows), sep="\n")
    return ExitCode.OK
