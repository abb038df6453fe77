"""`bench`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from llama_adapter.app.command_line.flags import command
from llama_adapter.app.command_line.values import settings, spec_from
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import ExitCode, UsageError


def add_bench(commands: Any) -> None:
    """Add `bench`."""
    command(commands, "bench", _run_bench)


def _run_bench(options: argparse.Namespace) -> int:
    spec = spec_from(options)
    from llama_adapter.app.command_line.measuring.bench import BenchJob, run_bench
    from llama_adapter.app.command_line.measuring.bench_report import format_table, write_plot
    from llama_adapter.runtime.plots import check_plot

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
        with atomic_write(options.out) as file:
            file.write(as_json.encode() + b"\n")
    if options.plot is not None:
        write_plot(result, options.plot)
    print(as_json if options.json else format_table(result))
    return ExitCode.OK
