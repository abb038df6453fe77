"""The command `doctor`: the table of the environment, the findings about a model, and the exit code.

`environment.py`, `model.py`, `encoder.py` and `decoder.py` do the checks. This module rates the results by what the
user's flags need, and prints them. torch is imported only after the table shows that it is usable.
"""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

from llama_adapter.app.command_line.doctor.environment import (
    WITH_TORCH,
    Probe,
    fold,
    is_needed,
    look_at_environment,
    purposes,
)
from llama_adapter.app.command_line.doctor.findings import Finding
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.text import counted, shown_text

Level = Literal["ok", "absent", "warning", "error"]

# Width without a terminal (that of the narrowest common terminal), and limits: longer lines are hard to read.
PIPE_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 60, 120
NAME_WIDTH, LEVEL_WIDTH = 19, 9


def weigh(probe: Probe, *, uses: frozenset[str]) -> Level:
    """The level of a part for these uses. A part that no use needs may be absent; if broken, it is a warning."""
    if probe.state == "ok":
        return "ok"
    if is_needed(probe.name, uses=uses):
        return "error"
    return "absent" if probe.state == "absent" else "warning"


def environment_table(probes: Iterable[Probe], *, uses: frozenset[str], width: int) -> list[str]:
    """The lines of the table: part, state, what was found, and a hint below. Only unbreakable words exceed `width`."""
    lines = [f"{'part':<{NAME_WIDTH}}{'state':<{LEVEL_WIDTH}}found"]
    for probe in probes:
        start = f"{probe.name:<{NAME_WIDTH}}{weigh(probe, uses=uses):<{LEVEL_WIDTH}}"
        lines += _wrapped(_found(probe, uses=uses), first=start, rest=" " * len(start), width=width)
        if probe.hint:
            hint = f"{'':<{NAME_WIDTH}}{'hint:':<{LEVEL_WIDTH}}"
            lines += _wrapped(probe.hint, first=hint, rest=" " * len(hint), width=width)
    return lines


def _found(probe: Probe, *, uses: frozenset[str]) -> str:
    """What was found. For an absent part, also the uses that need it: those among `uses`, or else all."""
    if probe.state != "absent":
        return probe.found or "there"
    found = probe.found or ("none" if probe.name.endswith("devices") else "not installed")
    needing = [use for use in purposes(probe.name) if use in uses] or purposes(probe.name)
    if not needing:
        return found
    return f"{found}; needed for {'every command' if 'always' in needing else ', '.join(needing)}"


def _wrapped(text: str, *, first: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(
        shown_text(" ".join(text.splitlines())),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,  # paths and commands are for copying
        break_on_hyphens=False,
    )


def finding_lines(findings: Iterable[Finding], *, width: int) -> list[str]:
    """The lines about a model: one or more for each finding, and its hint below."""
    lines = []
    for finding in findings:
        start = f"{finding.level:<{LEVEL_WIDTH}} "
        rest = " " * len(start)
        lines += _wrapped(f"{finding.what}: {finding.sentence}", first=start, rest=rest, width=width)
        if finding.hint:
            lines += _wrapped(finding.hint, first=f"{rest}hint: ", rest=f"{rest}      ", width=width)
    return lines


def terminal_width() -> int:
    """The number of columns to use: those of the terminal, within limits; a fixed number for a pipe."""
    return min(max(shutil.get_terminal_size((PIPE_WIDTH, 1)).columns, MIN_WIDTH), MAX_WIDTH)


def summary(checks: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """The last line of the output, for pairs (part, level), and the number of errors."""
    levels = [level for _, level in checks]
    failed = list(dict.fromkeys(name for name, level in checks if level == "error"))
    counts = {level: levels.count(level) for level in ("error", "warning") if level == "error" or level in levels}
    parts = [f"{number or 'no'} {level}{'' if number == 1 else 's'}" for level, number in counts.items()]
    line = f"{', '.join(parts)} in {counted(len(levels), 'check')}"
    if failed:
        line += f"{', to fix in this order' if len(failed) > 1 else ''}: {', '.join(failed)}"
    return line, levels.count("error")


def run_checkup(spec: CaptionerSpec | None, *, uses: frozenset[str]) -> int:
    """Print the environment's table, then the findings about the model of `spec` and its exported encoder, if any.

    Returns the exit code. The table is printed first, because reading a large model takes minutes.
    """
    width = terminal_width()
    probes = look_at_environment()
    print("\n".join(environment_table(fold(probes, uses=uses), uses=uses, width=width)), flush=True)
    checks: list[tuple[str, str]] = [(probe.name, weigh(probe, uses=uses)) for probe in probes]
    if spec is not None:
        basic = uses & {"always", WITH_TORCH}
        unusable = [probe.name for probe in probes if probe.state != "ok" and is_needed(probe.name, uses=basic)]
        if unusable:
            sentence = f"Without {', '.join(unusable)} the model cannot be checked"
            findings = [Finding(level="not tried", what="model", sentence=sentence)]
        else:
            findings = _diagnose(spec)
        print("", *finding_lines(findings, width=width), sep="\n")
        checks += [(finding.what, finding.level) for finding in findings]
    line, num_errors = summary(checks)
    print("", *_wrapped(line, first="", rest=" " * 4, width=width), sep="\n")
    return ExitCode.FAILED if num_errors else ExitCode.OK


def _diagnose(spec: CaptionerSpec) -> list[Finding]:
    if spec.decoder is not None:
        from llama_adapter.app.command_line.doctor.decoder import diagnose_decoder

        return diagnose_decoder(spec)
    from llama_adapter.app.command_line.doctor.encoder import diagnose_with_encoder
    from llama_adapter.app.command_line.doctor.model import diagnose

    return diagnose(spec) if spec.encoder is None else diagnose_with_encoder(spec)
