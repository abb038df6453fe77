"""`eval`."""

import argparse
import os
from typing import Any

from llama_adapter.app.command_line.flags import command
from llama_adapter.app.command_line.values import settings, spec_from
from llama_adapter.runtime.errors import UsageError


def add_eval(commands: Any) -> None:
    """Add `eval`."""
    command(commands, "eval", _run)


def _run(options: argparse.Namespace) -> int:
    if os.path.lexists(options.out) and not os.path.isdir(options.out):
        raise UsageError(f"--out is a folder, and `{options.out}` is a file")
    spec = spec_from(options, sees_pictures=False)  # data may be text alone
    from llama_adapter.app.learning.evaluating.data import DataSettings
    from llama_adapter.app.learning.evaluating.job import EvaluationJob, run_evaluation
    from llama_adapter.runtime.settings.sources import to_run_again

    given = vars(options)
    values = {
        "spec": spec,
        "data": settings(DataSettings, {**given, "data": tuple(options.data)}),
        "settings": to_run_again(options.effective, command="eval"),
    }
    return run_evaluation(settings(EvaluationJob, {**given, **values}))
