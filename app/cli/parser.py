"""The argument parser of all commands, and texts that they share."""

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from llama_adapter.runtime.errors import UsageError

EXIT_CODES = """\
exit codes: 0 success, 1 failure, 2 usage error or device unavailable, 3 finished but some pictures could not be read,
130 interrupted
"""

DEVICES = "cpu, cuda, cuda:1, npu:0, ... or auto"

_ELSEWHERE = {
    "--prompt": "--question",
    "--question": "--prompt",
    "--output": "--out",
    "-o": "--out",
    "-r": "--recursive",
}


class Parser(argparse.ArgumentParser):
    """Raises usage errors as UsageError."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=help_hint(self.prog))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accept positional names between flags; argparse alone accepts only one group of them.

        Unknown arguments raise here, so that the hint names the help of the sub-command.
        """
        options, unknown = super().parse_known_args(args, namespace)
        names = next((action.dest for action in self._get_positional_actions() if action.nargs in ("*", "+")), None)
        at = unknown.index("--") if "--" in unknown else len(unknown)  # everything behind it is a name
        if names is not None and not any(text.startswith("-") for text in unknown[:at]):
            setattr(options, names, getattr(options, names) + unknown[:at] + unknown[at + 1 :])
        elif unknown:
            meant = next((flag for text in unknown if (flag := self._meant(text)) is not None), None)
            hint = help_hint(self.prog) if meant is None else f"{meant} may be meant; {help_hint(self.prog)}"
            raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", hint=hint)
        return options, []

    def _meant(self, text: str) -> str | None:
        """The flag that is similar to what was typed, or has this name in other programs."""
        typed, known = text.split("=")[0].replace("_", "-"), list(self._option_string_actions)
        if not typed.startswith("-"):
            return None
        names = {name: name for name in known} | {name: ours for name, ours in _ELSEWHERE.items() if ours in known}
        nearest = difflib.get_close_matches(typed, [typed] if typed in names else names, n=1, cutoff=0.85)
        return names[nearest[0]] if nearest else None


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: str) -> Parser:
    parser: Parser = commands.add_parser(name, epilog=EXIT_CODES, **texts)
    parser.set_defaults(command=run, prog=parser.prog)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def help_hint(program: str) -> str:
    return f"see `{program} --help`"


def default(text: str = "") -> str:
    return f"{text} (default: %(default)s)".lstrip()
