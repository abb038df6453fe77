"""What every command line of ours is made of: usage errors that are raised, and words that help texts share."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from app.errors import UsageError

EXIT_CODES = """\
exit codes: 0 all good, 1 failed, 2 usage or a device that cannot be had, 3 finished but some pictures could not be
read, 130 interrupted
"""

DEVICE_KINDS = "cpu, cuda, cuda:N, npu, npu:N or auto"

DEVICES = "cpu, cuda, cuda:1, npu:0, ... or auto"


class Parser(argparse.ArgumentParser):
    """Usage errors are raised, to be told like every other error."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=help_hint(self.prog))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Unknown arguments are an error here already: left to the parser above, its help would be pointed at."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: str) -> Parser:
    parser: Parser = commands.add_parser(name, epilog=EXIT_CODES, **texts)
    parser.set_defaults(command=run, prog=parser.prog)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def help_hint(program: str) -> str:
    return f"`{program} --help` lists what there is"


def default(text: str = "") -> str:
    return f"{text} (default: %(default)s)".lstrip()
