"""The command line. Help and usage errors import neither torch nor numpy."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from llama_adapter import __version__
from llama_adapter.app.command_line.commands.answering import (
    add_installed_tasks,
    add_tasks,
    list_tasks,
    run_export_records,
)
from llama_adapter.app.command_line.commands.config import Settings, add_config_commands
from llama_adapter.app.command_line.commands.doctor import run_doctor
from llama_adapter.app.command_line.commands.encode import run_encode
from llama_adapter.app.command_line.commands.evaluate import run_bench, run_eval
from llama_adapter.app.command_line.commands.export import add_export
from llama_adapter.app.command_line.commands.label import run_label
from llama_adapter.app.command_line.commands.models import run_convert, run_get, run_pack, run_quantize
from llama_adapter.app.command_line.commands.reference import add_reference
from llama_adapter.app.command_line.commands.serve import add_serving
from llama_adapter.app.command_line.commands.train import add_train
from llama_adapter.app.command_line.flags import command, description
from llama_adapter.app.command_line.names import locate_names
from llama_adapter.app.command_line.parser import EXIT_CODES, Parser, check_required, help_hint
from llama_adapter.app.command_line.values import spec_from
from llama_adapter.app.models.parallel.launch import launched_follower, quieten_torch, refuse_launch
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.setting import meant
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from llama_adapter.runtime.torch_import import prepare_imports

__all__ = ["Settings", "build_parser", "load_settings", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are printed on stderr, see runtime/problems.py."""
    prepare_imports()
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_guarded(lambda: _dispatch(arguments), debug="--debug" in arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    _check_current_folder()
    run: Callable[[argparse.Namespace], int] = options.command
    try:
        check_required(options)
        locate_names(options)
        num_ranks = vars(options).get("tensor_parallel")
        if isinstance(num_ranks, int) and num_ranks > 1:
            quieten_torch()
            if vars(options).get("engine") == "ray":
                refuse_launch(num_ranks)
            if (place := launched_follower(num_ranks)) is not None:
                from llama_adapter.app.models.parallel.rank_process import run_launched

                # `torchrun` started the command once for each rank; the first rank runs the command.
                return run_launched(place, spec_from(options, sees_pictures=False))
        return run(options)
    except UsageError as error:
        error.hint = error.hint or help_hint(options.prog)
        raise


def load_settings(
    path: str | os.PathLike[str] | None = None, *, command: str = "caption", **overrides: Any
) -> Settings:
    """The settings that a command would use: overrides by key, LLAMA_ADAPTER_... variables, the file, defaults.

    Parameters:
        path: a YAML file, or the manifest of a run. None: no file.
        command: `caption`, `ask`, `serve`, `export onnx`, ...
        overrides: such as `batch_size=4`; a value of None is ignored.

    Raises UsageError for invalid settings and for a file that cannot be read.
    """
    from llama_adapter.runtime.settings.yaml_file import as_given

    commands = build_parser().commands()
    if command not in commands:
        raise UsageError(f"No command is named `{command}`", hint=meant(command, commands))
    parser = commands[command]
    declared = {setting.key: setting for setting in parser.settings()}
    unset = {setting.dest: None for setting in declared.values()}
    options = argparse.Namespace(config=None if path is None else os.fspath(path), **unset)
    for key, value in overrides.items():
        if key not in declared:
            raise UsageError(f"`{command}` has no setting named `{key}`", hint=meant(key, declared))
        if (text := as_given(value, key)) is not None:
            try:
                setattr(options, declared[key].dest, declared[key].read(text))
            except ValueError as error:
                raise UsageError(f"{key}: {error}") from None
    parser.resolve(options, list(declared.values()))
    return Settings(command=command, effective=tuple(options.effective))


def _check_current_folder() -> None:
    """Raise UsageError if the current folder was removed: libraries below torch would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "The current folder does not exist: the one that this command was started in was removed",
            hint="change into an existing folder (`cd`), and run the command again",
        ) from None


def build_parser() -> Parser:
    """The parser of all commands and flags. Defaults come from the dataclasses that receive the values."""
    parser = Parser(prog="llama-adapter", description=description("llama-adapter"), epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"llama-adapter {__version__}", help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    add_tasks(commands)
    command(commands, "encode", run_encode, parts=("pictures", "encode"))
    command(commands, "export-records", run_export_records)
    command(commands, "eval", run_eval)
    command(commands, "label", run_label, parts=("label", "model"))
    add_train(commands)
    command(commands, "get", run_get)
    command(commands, "convert", run_convert)
    command(commands, "quantize", run_quantize)
    command(commands, "pack", run_pack)
    add_export(commands)
    command(commands, "bench", run_bench)
    add_serving(commands)
    command(commands, "doctor", run_doctor)
    add_reference(commands, run=_dispatch)
    add_config_commands(commands)
    command(commands, "tasks", list_tasks)
    add_installed_tasks(commands)
    parser.commands()
    return parser
