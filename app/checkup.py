"""The command `doctor`: the table of the environment, the findings about a model, and the exit code of both.

What is looked at is decided in app/environment.py and app/doctor.py; here it is weighed against what the user's flags
need, and printed.
"""

import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from app.doctor import Finding, diagnose
from app.environment import Probe, is_needed, look_at_environment, purposes, uses_of
from app.errors import Exit

if TYPE_CHECKING:
    from app.checkpoints import ModelSources

Level = Literal["ok", "absent", "warning", "error"]

ALWAYS = uses_of()

MIN_WIDTH, MAX_WIDTH = 100, 140
NAME_WIDTH, LEVEL_WIDTH = 14, 9


def weigh(probe: Probe, *, uses: frozenset[str]) -> Level:
    """How bad it is for these uses: a part that nothing asks for may be absent, and broken is worth a warning."""
    if probe.state == "ok":
        return "ok"
    if is_needed(probe.name, uses=uses):
        return "error"
    return "absent" if probe.state == "absent" else "warning"


def environment_table(probes: Iterable[Probe], *, uses: frozenset[str], width: int) -> list[str]:
    """The lines: part, state, what was found, what to do; what does not fit beside stands on lines of its own."""
    rows = [("part", "state", "found", "what to do")]
    rows += [(probe.name, weigh(probe, uses=uses), _found(probe), probe.hint) for probe in probes]
    # Short cells make the column; a long one takes its line to the end.
    room = (width - NAME_WIDTH - LEVEL_WIDTH) // 2
    found_width = max(len(found) for _, _, found, _ in rows if len(found) < room) + 2
    return [line for row in rows for line in _row(*row, found_width=found_width, width=width)]


def _found(probe: Probe) -> str:
    """What was found, or of a part that is not there, what would need it."""
    uses = [use for use in purposes(probe.name) if use != "always"]
    return probe.found or (f"for {', '.join(uses)}" if uses else "-")


def _row(name: str, level: str, found: str, hint: str, *, found_width: int, width: int) -> list[str]:
    start = f"{name:<{NAME_WIDTH}}{level:<{LEVEL_WIDTH}}"
    if len(found) < found_width and len(start) + found_width + len(hint) <= width:
        return [f"{start}{found:<{found_width}}{hint}".rstrip()]
    lines = _wrapped(found, first=start, rest=" " * len(start), width=width)
    if hint:
        indent = " " * NAME_WIDTH
        lines += _wrapped(hint, first=f"{indent}{'hint:':<{LEVEL_WIDTH}}", rest=" " * len(start), width=width)
    return lines


def _wrapped(text: str, *, first: str, rest: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,  # paths and commands are for copying
        break_on_hyphens=False,
    )


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """The lines about a model: one for each finding, and its hint below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<{LEVEL_WIDTH}} {finding.what}: {finding.sentence}")
        lines += [f"{'':<{LEVEL_WIDTH}} hint: {finding.hint}"] if finding.hint else []
    return lines


def terminal_width() -> int:
    """Columns to use: those of the terminal, in limits; pipes have none and get the least."""
    return min(max(shutil.get_terminal_size((MIN_WIDTH, 1)).columns, MIN_WIDTH), MAX_WIDTH)


def summary(levels: Iterable[str]) -> tuple[str, int]:
    """The last line, and the number of errors."""
    levels = list(levels)
    parts = []
    for level, noun in (("error", "error"), ("warning", "warning")):
        number = levels.count(level)
        if number or level == "error":
            parts.append(f"{number or 'no'} {noun}{'' if number == 1 else 's'}")
    return f"{', '.join(parts)} in {len(levels)} checks", levels.count("error")


def run_checkup(target: "ModelSources | str | None", *, uses: frozenset[str]) -> int:
    """Print the environment's table and then the findings about a model, if there is a `target`; returns the exit code.

    Each part is printed before the next is looked at: reading a large model takes minutes.
    """
    probes = look_at_environment()
    print("\n".join(environment_table(probes, uses=uses, width=terminal_width())), flush=True)
    levels: list[str] = [weigh(probe, uses=uses) for probe in probes]
    if target is not None:
        unusable = [probe.name for probe in probes if probe.state != "ok" and is_needed(probe.name, uses=ALWAYS)]
        findings = [_not_tried(unusable)] if unusable else diagnose(target)
        print("", *finding_lines(findings), sep="\n")
        levels += [finding.level for finding in findings]
    line, num_errors = summary(levels)
    print(f"\n{line}")
    return Exit.FAILED if num_errors else Exit.OK


def _not_tried(unusable: list[str]) -> Finding:
    return Finding(
        level="not tried", what="model", sentence=f"Without {', '.join(unusable)} the model cannot be looked at"
    )
