"""The command line: flags -> plain values -> the code that does the work. Help and usage errors load no model code."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from llama_adapter.app.cli.answering import add_tasks
from llama_adapter.app.cli.bench import add_bench
from llama_adapter.app.cli.doctor import add_doctor
from llama_adapter.app.cli.export import add_export
from llama_adapter.app.cli.models import add_convert, add_quantize
from llama_adapter.app.cli.parser import EXIT_CODES, Parser, help_hint
from llama_adapter.app.cli.records import add_export_records
from llama_adapter.app.cli.serve import add_serving
from llama_adapter.app.terminal.run_guarded import run_guarded
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.torch_import import decline_telemetry, defer_device_extensions

__all__ = ["build_parser", "main"]


_DESCRIPTION = """\
Caption pictures and answer questions about them with LLaMA-Adapter V2 models.

  llama-adapter caption photo.jpg folder/
  llama-adapter ask photo.jpg --question "Is there a red circle?" --choices Yes,No
  llama-adapter caption photos --recursive --out captions.jsonl
  llama-adapter export-records captions.jsonl --to csv --out captions.csv
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are told on stderr, see runtime/problems.py."""
    defer_device_extensions()
    decline_telemetry()
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_guarded(lambda: _dispatch(arguments), debug="--debug" in arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    _check_current_folder()
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except UsageError as error:
        error.hint = error.hint or help_hint(options.prog)
        raise


def _check_current_folder() -> None:
    """Raise UsageError where the current folder was removed: libraries below torch end the process there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "Wanted a current folder, but the one that this command was started in was removed",
            hint="change into a folder that is there (`cd`), and run the command again",
        ) from None


def build_parser() -> Parser:
    """All commands and flags; defaults come from the dataclasses they end up in."""
    parser = Parser(prog="llama-adapter", description=_DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add_tasks(commands)
    add_export_records(commands)
    add_convert(commands)
    add_quantize(commands)
    add_export(commands)
    add_bench(commands)
    add_serving(commands)
    add_doctor(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"llama-adapter {version('llama-adapter')}")
        except PackageNotFoundError:
            print("llama-adapter (run from a checkout, not installed)")
        parser.exit()
