"""`config` and `completion`, and settings for Python programs."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from llama_adapter.app.command_line.parser import EXIT_CODES, Parser, command
from llama_adapter.app.command_line.values import settings
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.settings.setting import nearest
from llama_adapter.runtime.terminal.stderr_lines import say

if TYPE_CHECKING:
    from llama_adapter.runtime.settings.sources import Effective

_CONFIG = """\
Show, describe and import settings. Every flag of a command is also a key of a YAML file (--config FILE.yaml) and an
environment variable: LLAMA_ADAPTER_ and the key in capitals. A flag takes precedence over its variable, a variable over
the file, and the file over the default.

  llama-adapter config show caption photos --batch-size 4 > run.yaml
  llama-adapter caption --config run.yaml
"""

_SHOW = """\
Print the settings that a command would use, as a file for --config; a comment says where each comes from. Without
COMMAND, the command of the file is used, or `caption`.

  llama-adapter config show caption photos --batch-size 4
  llama-adapter config show --config run.yaml
"""

_SCHEMA = """\
Print a JSON schema (draft 2020-12) of files of settings: editors complete and check them with it.

  llama-adapter config schema > llama-adapter.schema.json
"""

_IMPORT = """\
Translate a file of MindFormers, ModelRunner or PaddleNLP to settings of this program. The settings go to stdout or
--out; stderr says how each key was translated. --config takes such files directly, too.
"""

_COMPLETION = """\
Print the completion of a shell: it knows the commands, their flags and the choices of these.

  source <(llama-adapter completion bash)                                        in ~/.bashrc
  llama-adapter completion zsh > FOLDER/_llama-adapter                           FOLDER is in $fpath, before compinit
  llama-adapter completion fish > ~/.config/fish/completions/llama-adapter.fish
"""

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
        values = {
            one.setting.dest: tuple(one.value) if isinstance(one.value, list) else one.value for one in self.effective
        }
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


def load(root: Parser, path: str | None, *, command: str, given: Mapping[str, Any]) -> Settings:
    """The settings of a command; `given` values, by key, take precedence. Raises UsageError, and OSError."""
    from llama_adapter.runtime.settings.yaml_file import as_given

    parser = _command(root, command)
    declared = {setting.key: setting for setting in parser.settings()}
    options = argparse.Namespace(config=path, **{setting.dest: None for setting in declared.values()})
    for key, value in given.items():
        if key not in declared:
            hint = f"`{similar}` may be meant" if (similar := nearest(key, declared)) else ""
            raise UsageError(f"`{command}` has no setting named `{key}`", hint=hint)
        if (text := as_given(value, key)) is not None:
            try:
                setattr(options, declared[key].dest, declared[key].read(text))
            except ValueError as error:
                raise UsageError(f"{key}: {error}") from None
    parser.resolve(options, list(declared.values()))
    return Settings(command=command, effective=tuple(options.effective))


def add_config_commands(commands: Any) -> None:
    """Add `config show`, `config schema`, `config import` and `completion`."""
    text = "show, describe and import settings"
    config = commands.add_parser("config", help=text, description=_CONFIG, epilog=EXIT_CODES)
    kinds = config.add_subparsers(metavar="KIND", required=True)
    text = "print the effective settings of a command, and where each comes from"
    command(kinds, "show", _show, declare=_declare_show, help=text, description=_SHOW)
    command(kinds, "schema", _schema, help="print a JSON schema of files of settings", description=_SCHEMA)
    text = "translate a file of another system"
    command(kinds, "import", _import, declare=_declare_import, help=text, description=_IMPORT)
    text = "print the completion of a shell"
    command(commands, "completion", _complete, declare=_declare_completion, help=text, description=_COMPLETION)


def _declare_show(parser: Parser) -> None:
    parser.takes_words = True
    parser.add_argument("words", metavar="COMMAND FLAGS", nargs="*", help="a command with any of its flags")


def _declare_import(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a YAML or JSON file, or a command line in a .txt or .sh")
    parser.add_argument("--out", metavar="OUR.yaml", help="file to write (default: stdout)")


def _declare_completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


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
    from llama_adapter.runtime.atomic_write import atomic_write
    from llama_adapter.runtime.settings.shown import format_settings

    imported = foreign.import_file(options.file)
    for entry in imported.report:
        say(str(entry))
    text = format_settings(imported.settings)
    if options.out is None:
        print(text, end="")
        return ExitCode.OK
    with atomic_write(options.out) as file:
        file.write(text.encode(errors="backslashreplace"))
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


def _command(root: Parser, name: str) -> Parser:
    commands = root.commands()
    if name not in commands:
        hint = f"`{similar}` may be meant" if (similar := nearest(name, commands)) else ""
        raise UsageError(f"No command is named `{name}`", hint=hint)
    return commands[name]
