"""The argument parser of all commands, and texts that they share."""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.settings.setting import SECTIONS, Setting, meant, nearest
from llama_adapter.runtime.terminal.stderr_lines import say

EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 usage error, faulty data or device unavailable, 3 finished but some pictures could
not be read, 130 interrupted
"""

_MOST_SHOWN = 24  # commands with at most this many flags show all of them in their help


A = TypeVar("A", bound=argparse.Action)


class Group(argparse._ArgumentGroup):
    """Flags under one heading of the help. `section` is the section of their settings in files.

    Flags without a section are not settings: they come from the command line only.
    """

    section: str | None = None

    def add_argument(
        self,
        *names: str,
        key: str | None = None,
        section: str | None = None,
        separator: str | None = None,
        first: bool = False,
        required: bool = False,
        **declared: Any,
    ) -> argparse.Action:
        """Declare a flag and its setting, with the parameters of argparse and these:

        `key` is the setting's name in files (default: `dest`). With a `separator` between items, files may give a list.
        `first` flags are shown in the short help. A `required` setting may come from any source.
        """
        if required and declared.get("help"):
            declared["help"] += " (required)"
        action = super().add_argument(*names, **declared)
        vars(action).update(key=key or action.dest, separator=separator, is_first=first, is_required=required)
        vars(action)["section"] = section or self.section
        if declared.get("action") == "store_true":  # turns off what a file or the environment turned on
            name = names[-1].removeprefix("--")
            opposite = "--" + (name.removeprefix("no-") if name.startswith("no-") else f"no-{name}")
            super().add_argument(opposite, dest=action.dest, action="store_false", help=argparse.SUPPRESS)
        return action

    def _add_action(self, action: A) -> A:
        vars(action).update(key=action.dest, section=self.section, separator=None, is_first=False, is_required=False)
        return super()._add_action(action)


class Parser(argparse.ArgumentParser):
    """Parses a command line; its settings may also come from the environment and a file. Raises UsageError.

    `declare` adds the flags when they are needed, so that listing the commands does not build every flag.
    """

    def __init__(self, *, declare: Callable[["Parser"], None] | None = None, **texts: Any) -> None:
        super().__init__(**texts, formatter_class=_Formatter, allow_abbrev=False, add_help=False)
        self._declare = declare
        self.root = self
        self.takes_words = False  # whether all arguments are collected as `words`, for another parser
        self.variables: dict[str, str] = {}  # by `dest`: environment variables with another name than usual
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="GROUP", help="this help, or a part of it")

    def add_argument_group(self, title: Any = None, description: Any = None, section: Any = None, **more: Any) -> Group:
        """As argparse; `section` is the section of the group's settings in files."""
        group = Group(self, title, description, **more)
        group.section = section
        self._action_groups.append(group)
        return group

    def add_argument(self, *names: Any, **declared: Any) -> argparse.Action:
        """As `Group.add_argument`, under the headings for positional arguments and options."""
        group = self._optionals if names[0].startswith("-") else self._positionals
        return group.add_argument(*names, **declared)

    @property
    def name(self) -> str:
        """The command, such as `caption` or `export onnx`."""
        return self.prog.partition(" ")[2] or self.prog

    def fill(self) -> None:
        """Declare the flags, once."""
        declare, self._declare = self._declare, None
        if declare is not None:
            declare(self)

    def settings(self) -> list[Setting]:
        """The settings of this command, in the order of their declaration."""
        self.fill()
        by_dest: dict[str, list[Any]] = {}
        for action in self._actions:
            if getattr(action, "section", None) is not None:
                by_dest.setdefault(action.dest, []).append(action)
        return [_setting(actions) for actions in by_dest.values()]

    def commands(self) -> dict[str, "Parser"]:
        """All sub-commands of this command, by name; without any, the command itself."""
        if self._subparsers is None:
            return {self.name: self}
        found: dict[str, Parser] = {}
        for action in self._subparsers._group_actions:
            for parser in dict(action.choices or {}).values():
                parser.root = self.root
                found |= parser.commands()
        return found

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=help_hint(self.prog))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accept positional names between flags; argparse alone accepts only one group of them.

        Unknown arguments raise here, so that the hint names the help of the sub-command. A command that needs a
        sub-command and gets no arguments prints its help on stderr. The namespace holds the values of all sources, and
        `effective`, which gives the source of each.
        """
        if self._subparsers is not None:
            if not (sys.argv[1:] if args is None else args):
                self.print_help(sys.stderr)
                raise SystemExit(ExitCode.USAGE)
            return super().parse_known_args(args, namespace)
        settings = self.settings()
        if self.takes_words and not set(args or ()) & {"-h", "--help"}:
            return argparse.Namespace(**self._defaults, words=list(args), effective=[]), []
        # No flag has the value None, so a setting that is None after parsing was not on the command line.
        given = argparse.Namespace(**{setting.dest: None for setting in settings})
        options, unknown = super().parse_known_args(args, given)
        names = next((action.dest for action in self._get_positional_actions() if action.nargs in ("*", "+")), None)
        at = unknown.index("--") if "--" in unknown else len(unknown)  # everything after it is a name
        if names is not None and not any(text.startswith("-") for text in unknown[:at]):
            setattr(options, names, getattr(options, names) + unknown[:at] + unknown[at + 1 :])
        elif unknown:
            similar = next((flag for text in unknown if (flag := self._meant(text)) is not None), None)
            prompt = None if names is not None else self._option_string_actions.get("--prompt")
            if prompt and getattr(options, prompt.dest) is None and not any(text.startswith("-") for text in unknown):
                similar = "--prompt"
            hint = help_hint(self.prog) if similar is None else f"{similar} may be meant; {help_hint(self.prog)}"
            if names is not None and any(text.startswith("-") and os.path.lexists(text) for text in unknown[:at]):
                hint = f"names of files that begin with `-` come after `--`; {help_hint(self.prog)}"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", hint=hint)
        options.effective = []
        if settings:
            self.resolve(options, settings)
        return options, []

    def resolve(self, options: argparse.Namespace, settings: Sequence[Setting]) -> None:
        """Set values that the command line does not give: from the environment, the file `config`, and defaults."""
        from llama_adapter.runtime.settings.sources import resolve

        file = None
        if (path := getattr(options, "config", None)) is not None:
            from llama_adapter.app.command_line.settings_file import read_settings

            file = read_settings(path)
            for note in file.notes:
                say(note)
        values = {setting.dest: getattr(options, setting.dest) for setting in settings}
        options.effective = resolve(
            settings,
            command=self.name,
            given={dest: value for dest, value in values.items() if value is not None and value != []},
            file=file,
            variables=self.variables,
            commands=lambda: {name: parser.settings() for name, parser in self.root.commands().items()},
        )
        for one in options.effective:
            setattr(options, one.setting.dest, one.value)

    def format_help(self, group: str | None = None) -> str:
        """The help text: the most common flags, or those of a group (a section of settings, or `all`).

        A command with few flags shows all of them.
        """
        shown, names = self._shown(group)
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, shown, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for heading in self._action_groups:
            if own := [one for one in heading._group_actions if one in shown and one.help is not argparse.SUPPRESS]:
                formatter.start_section(heading.title)
                formatter.add_text(heading.description)
                formatter.add_arguments(own)
                formatter.end_section()
        if names:
            formatter.add_text(f"more flags: --help all, or --help with one of these groups: {', '.join(names)}")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _shown(self, group: str | None) -> tuple[list[argparse.Action], list[str]]:
        """The actions that the help shows, and the names of the groups that have the others."""
        self.fill()
        sections = {vars(action).get("section"): None for action in self._actions}
        names = [str(name) for name in SECTIONS if name in sections]
        if group not in (None, "all", *names):
            raise UsageError(f"No group of flags is named `{group}`", hint=f"pass one of {', '.join(('all', *names))}")
        if group == "all" or (group is None and len(self._actions) <= _MOST_SHOWN):
            return self._actions, []
        if group is None:
            return [a for a in self._actions if vars(a).get("is_first") or vars(a).get("section") is None], names
        return [action for action in self._actions if vars(action).get("section") == group], names

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse; for a misspelled value, the hint names a similar one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            similar = meant(str(value), [str(choice) for choice in action.choices or ()], cutoff=0.6)
            raise UsageError(str(error), hint="; ".join(filter(None, (similar, help_hint(self.prog))))) from None

    def _meant(self, text: str) -> str | None:
        """The flag that the user may have meant: a similar one, or the equivalent of another program's flag."""
        typed, known = text.split("=")[0].replace("_", "-"), list(self._option_string_actions)
        if not typed.startswith("-"):
            return None
        names = {name: name for name in known} | {
            name: ours for name, ours in read_table("flags.json")["elsewhere"].items() if ours in known
        }
        similar = typed if typed in names else nearest(typed, names, cutoff=0.85)
        return None if similar is None else names[similar]


class _Formatter(argparse.HelpFormatter):
    """Fills paragraphs to the terminal, up to 118 columns, and breaks no flag; lines that begin with a space stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        shown: list[str] = []
        for is_prose, group in groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
            lines = list(group)
            shown += self._split_lines(" ".join(lines), min(width, 118)) if is_prose else lines
        return "\n".join(indent + line for line in shown)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


class _Help(argparse.Action):
    """Prints the help, or one group of it. For a list of commands, its value is a command, whose help is printed."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if parser._subparsers is not None and values is not None:
            (commands,) = parser._subparsers._group_actions
            parser._check_value(commands, values)
            parser, values = commands.choices[values], None
        print(parser.format_help(values), end="")
        parser.exit()


def _setting(actions: Sequence[Any]) -> Setting:
    """The setting of one flag, or of several flags with the same `dest`."""
    first = actions[0]
    flags = {action.const: action.option_strings[-1] for action in actions if action.nargs == 0}
    is_switch = all(isinstance(value, bool) for value in flags)
    is_list = isinstance(first, argparse._AppendAction) or first.nargs in ("*", "+")
    shown = [action for action in actions if action.help is not argparse.SUPPRESS] or [first]
    return Setting(
        section=first.section,
        key=first.key,
        dest=first.dest,
        shown=first.option_strings[0] if first.option_strings else str(first.metavar),
        help=" / ".join(action.help % vars(action) for action in shown if action.help is not argparse.SUPPRESS),
        default=[] if first.nargs in ("*", "+") and first.default is None else first.default,
        parse=first.type or str,
        choices=() if flags and is_switch else tuple(flags or first.choices or ()),
        flags=flags,
        is_list=is_list,
        separator=first.separator,
        is_required=first.is_required,
    )


def add_config(parser: Parser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="settings from a file, or a run's manifest; flags and LLAMA_ADAPTER_... variables take precedence",
    )


def check_required(options: argparse.Namespace) -> None:
    """Raise UsageError for required settings that no source gives."""
    missing = [one.setting.shown for one in options.effective if one.setting.is_required and one.value in (None, [])]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")


@cache
def read_table(name: str) -> Any:
    """The content of a JSON file in this folder. Callers must not change it."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def help_hint(program: str) -> str:
    return f"see `{program} --help`"
