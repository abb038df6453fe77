"""`config` and `completion`, and settings for Python programs."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llama_adapter.app.command_line.flags import add_flags, add_parser, command
from llama_adapter.app.command_line.parser import Parser
from llama_adapter.app.command_line.values import settings
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.terminal.stderr_lines import say

if TYPE_CHECKING:
    from llama_adapter.runtime.settings.sources import Effective

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Mapping[str, Any]):
    """The effective settings of a command, by key: `run["batch_size"]`."""

    command: str
    effective: "tuple[Effective, ...]"

    def __getitem__(self, key: str) -> Any:
        found = [one.value for one in self.effective if one.setting.key == key]
        if not found:
            raise KeyError(key)
        return found[0]

    def __iter__(self) -> Iterator[str]:
        return (one.setting.key for one in self.effective)

    def __len__(self) -> int:
        return len(self.effective)

    def of(self, kind: type[T]) -> T:
        """An instance of the dataclass `kind`, made from the settings that are its fields. Raises UsageError."""
        values = {one.setting.dest: one.value for one in self.effective}
        return settings(kind, {**values, "effective": self.effective})

    @property
    def spec(self) -> CaptionerSpec:
        """The model and its computation, for `Captioner.from_spec`."""
        return self.of(CaptionerSpec)

    @property
    def sampling(self) -> dict[str, Any]:
        """The keyword arguments of `Captioner.generate` that choose tokens."""
        return dataclasses.asdict(self.of(SamplingParams))

    def to_yaml(self) -> str:
        """These settings as the text of a YAML file; comments give the source of each."""
        from llama_adapter.runtime.settings.shown import format_settings
        from llama_adapter.runtime.settings.sources import by_section

        sources = {one.setting.key: one.source for one in self.effective}
        return format_settings(by_section(self.effective, command=self.command), sources=sources)


def add_config_commands(commands: Any) -> None:
    """Add `config show`, `config schema`, `config import` and `completion`."""
    kinds = add_parser(commands, "config").add_subparsers(metavar="KIND", required=True)
    command(kinds, "config show", _show, declare=_declare_show)
    command(kinds, "config schema", _schema)
    command(kinds, "config import", _import)
    command(commands, "completion", _complete)


def _declare_show(parser: Parser) -> None:
    parser.takes_words = True
    add_flags(parser, "config show")


def _show(options: argparse.Namespace) -> int:
    from llama_adapter.app.command_line.settings_file import read_settings

    root, words = options.parser.root, list(options.words)
    if not words or words[0].startswith("-"):
        file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        file.add_argument("--config", nargs="?")
        path = file.parse_known_args(words)[0].config
        words = [*((path and read_settings(path).command) or "caption").split(), *words]
    shown = root.parse_args(words)
    if not shown.effective:
        raise UsageError(f"`{shown.parser.name}` has no settings")
    print(Settings(command=shown.parser.name, effective=tuple(shown.effective)).to_yaml(), end="")
    return ExitCode.OK


def _schema(options: argparse.Namespace) -> int:
    import json

    from llama_adapter.runtime.settings.shown import json_schema

    commands = {name: parser.settings() for name, parser in options.parser.root.commands().items()}
    print(json.dumps(json_schema({name: found for name, found in commands.items() if found}), indent=1))
    return ExitCode.OK


def _import(options: argparse.Namespace) -> int:
    from llama_adapter.app.compat import foreign
    from llama_adapter.runtime.atomic_write import write_text
    from llama_adapter.runtime.settings.shown import format_settings

    imported = foreign.import_file(options.file)
    say(imported.format_report(), end="")
    text = format_settings(imported.settings)
    if options.out is None:
        print(text, end="")
        return ExitCode.OK
    write_text(options.out, text)
    return ExitCode.OK


def _complete(options: argparse.Namespace) -> int:
    import shtab

    for parser in options.parser.root.commands().values():
        parser.fill()
        for action in parser._actions:
            if action.nargs != 0 and not action.choices and action.dest != "help":
                vars(action)["complete"] = shtab.FILE
    sys.stdout.write(shtab.complete(options.parser.root, shell=options.shell) + "\n")
    return ExitCode.OK
