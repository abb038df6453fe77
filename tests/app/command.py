"""The command line, called in this process, or several times in another one."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.app.golden import ROOT


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    modules: Sequence[str] = ()  # that are imported in the other process

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def told(self) -> str:
        """What is on stderr, as one line."""
        return " ".join(self.err.split())

    def texts(self) -> dict[str, str]:
        return {record["picture"]: record["text"] for record in self.records}


Run = Callable[..., Ran]

# As in a shell, variables may precede a command.
_SEVERAL = """
import json, os, sys
from llama_adapter.__main__ import main
for words in json.loads(sys.argv[1]):
    while words and "=" in words[0]:
        os.environ.update([words.pop(0).split("=")])
    code = int(main(words))
    for stream in (sys.stdout, sys.stderr):
        print("ended with", code, *sorted(sys.modules), file=stream, flush=True)
"""


def several(commands: Iterable[Sequence[str | Path]], *, before: str = "") -> list[str]:
    """The command line of a process that runs `before`, a program, and then the commands one after the other."""
    return [sys.executable, "-c", before + _SEVERAL, json.dumps([[*map(str, words)] for words in commands])]


def separated(out: str, err: str) -> list[Ran]:
    """What each command said, in the output of a process of `several`."""
    outs, errs = (re.split(r"^ended with (\d+) (.*)\n", said, flags=re.MULTILINE) for said in (out, err))
    return [Ran(int(outs[at + 1]), outs[at], errs[at], outs[at + 2].split()) for at in range(0, len(outs) - 1, 3)]


def run_several(
    commands: Iterable[Sequence[str | Path]], *, before: str = "", environ: Mapping[str, str] | None = None
) -> list[Ran]:
    """Run commands one after the other in one new process, which first runs the program `before`."""
    ran = subprocess.run(several(commands, before=before), capture_output=True, text=True, cwd=ROOT, env=environ)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return separated(ran.stdout, ran.stderr)
