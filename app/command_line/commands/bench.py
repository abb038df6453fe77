"""`bench`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from llama_adapter.app.command_line.model_flags import add_computation, add_model
from llama_adapter.app.command_line.parser import Parser, command, default
from llama_adapter.app.command_line.values import parse_batch_sizes, parse_text, settings, spec_from
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import ExitCode, UsageError

_BENCH = """\
Measure the speed of a model at several batch sizes, and compare it with the ceilings of the device: memory bandwidth
and matrix products, measured in the same run. --random needs no weights: 160M to 65B are LLaMAs of that size with
ViT-L/14.

  llama-adapter bench --random 160M --dtype bfloat16 --workload caption
"""


def add_bench(commands: Any) -> None:
    text = "measure the speed and the ceilings of the device"
    command(commands, "bench", _run_bench, declare=_declare, help=text, description=_BENCH)


def _declare(bench: Parser) -> None:
    add_model(bench)
    work = bench.add_argument_group("what is measured", section="profiling")
    work.add_argument(
        "--random",
        section="model",
        first=True,
        metavar="SIZE",
        help="random weights: 160M, 1B, 7B, 13B, 30B, 65B, tiny or DIMxLAYERSxHEADSxFFN",
    )
    work.add_argument(
        "--workload",
        choices=("yesno", "caption"),
        default="yesno",
        first=True,
        help=default("yesno: a choice of two in one pass; caption: 64 new tokens"),
    )
    work.add_argument(
        "--question",
        section="prompt",
        metavar="TEXT",
        type=parse_text,
        help="question of workload yesno (default: about a person)",
    )
    work.add_argument(
        "--batch-sizes",
        section="computation",
        metavar="N,...",
        type=parse_batch_sizes,
        separator=",",
        default="1,5,16",
        first=True,
        help=default("measured one after the other"),
    )
    work.add_argument(
        "--pictures",
        key="num_pictures",
        metavar="N",
        type=int,
        default=25,
        help=default("sample pictures in each round"),
    )
    work.add_argument("--rounds", metavar="N", type=int, default=3, help=default())
    add_computation(bench.add_argument_group("computation", section="computation"))
    output = bench.add_argument_group("output", section="output")
    output.add_argument("--out", metavar="FILE.json", first=True, help="write the result as JSON")
    output.add_argument("--plot", metavar="FILE.png", help="draw the result, as PNG or SVG (needs matplotlib)")
    output.add_argument(
        "--trace", section="profiling", metavar="FOLDER", help="write a trace of one more round of each batch size"
    )
    output.add_argument("--json", action="store_true", help="JSON on stdout instead of the table")
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")


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
