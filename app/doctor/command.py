"""The command `doctor`: the table of the environment, the findings about a model, and the exit code of both.

What is looked at is decided in `environment.py`, `model.py` and `encoder.py`; here it is weighed against what the
user's flags need, and printed.
"""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from llama_adapter.app.doctor.environment import Probe, fold, is_needed, look_at_environment, purposes, uses_of
from llama_adapter.app.doctor.model import Finding, diagnose
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.text import shown_text

if TYPE_CHECKING:
    from llama_adapter.app.doctor.encoder import EncoderQuestion
    from llama_adapter.app.models.checkpoints import ModelSources
    from llama_adapter.app.models.spec import Precision

Level = Literal["ok", "absent", "warning", "error"]

ALWAYS = uses_of()

# Without a terminal, as wide as the narrowest that is common; wider than the last, lines are hard to read.
PIPE_WIDTH, MIN_WIDTH, MAX_WIDTH = 80, 60, 120
NAME_WIDTH, LEVEL_WIDTH = 19, 9


def weigh(probe: Probe, *, uses: frozenset[str]) -> Level:
    """How bad it is for these uses: a part that nothing asks for may be absent, and broken is worth a warning."""
    if probe.state == "ok":
        return "ok"
    if is_needed(probe.name, uses=uses):
        return "error"
    return "absent" if probe.state == "absent" else "warning"


def environment_table(probes: Iterable[Probe], *, uses: frozenset[str], width: int) -> list[str]:
    """The lines: part, state, what was found, and below it what to do; nothing is wider, but what cannot be broken."""
    lines = [f"{'part':<{NAME_WIDTH}}{'state':<{LEVEL_WIDTH}}found"]
    for probe in probes:
        start = f"{probe.name:<{NAME_WIDTH}}{weigh(probe, uses=uses):<{LEVEL_WIDTH}}"
        lines += _wrapped(_found(probe, uses=uses), first=start, rest=" " * len(start), width=width)
        if probe.hint:
            hint = f"{'':<{NAME_WIDTH}}{'hint:':<{LEVEL_WIDTH}}"
            lines += _wrapped(probe.hint, first=hint, rest=" " * len(hint), width=width)
    return lines


def _found(probe: Probe, *, uses: frozenset[str]) -> str:
    """What was found; of a part that is not there also what needs it: of these uses, if they do, else of all."""
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
    """Columns to use: those of the terminal, within limits; pipes have none."""
    return min(max(shutil.get_terminal_size((PIPE_WIDTH, 1)).columns, MIN_WIDTH), MAX_WIDTH)


def summary(checks: Sequence[tuple[str, str]]) -> tuple[str, int]:
    """The last line, of pairs (what was looked at, level), and the number of errors."""
    levels = [level for _, level in checks]
    failed = list(dict.fromkeys(name for name, level in checks if level == "error"))
    parts = []
    for level, noun in (("error", "error"), ("warning", "warning")):
        number = levels.count(level)
        if number or level == "error":
            parts.append(f"{number or 'no'} {noun}{'' if number == 1 else 's'}")
    line = f"{', '.join(parts)} in {len(levels)} check{'' if len(levels) == 1 else 's'}"
    if failed:
        line += f"{', to fix in this order' if len(failed) > 1 else ''}: {', '.join(failed)}"
    return line, levels.count("error")


def run_checkup(
    target: "ModelSources | str | None",
    *,
    uses: frozenset[str],
    encoder: "EncoderQuestion | None" = None,
    precision: "Precision | None" = None,
) -> int:
    """Print the environment's table, then the findings about a model, if there is a `target`, and about its encoder.

    A bundle's known answer is replayed in `precision`, its own where there is none.

    Returns the exit code. The table is printed before the model is looked at: reading a large one takes minutes.
    """
    width = terminal_width()
    probes = look_at_environment()
    print("\n".join(environment_table(fold(probes, uses=uses), uses=uses, width=width)), flush=True)
    checks: list[tuple[str, str]] = [(probe.name, weigh(probe, uses=uses)) for probe in probes]
    if target is not None:
        unusable = [probe.name for probe in probes if probe.state != "ok" and is_needed(probe.name, uses=ALWAYS)]
        findings = [_not_tried(unusable)] if unusable else _diagnose(target, encoder, precision)
        print("", *finding_lines(findings, width=width), sep="\n")
        checks += [(finding.what, finding.level) for finding in findings]
    line, num_errors = summary(checks)
    print("", *_wrapped(line, first="", rest=" " * 4, width=width), sep="\n")
    return ExitCode.FAILED if num_errors else ExitCode.OK


def _diagnose(
    target: "ModelSources | str", encoder: "EncoderQuestion | None", precision: "Precision | None"
) -> list[Finding]:
    if encoder is None:
        return diagnose(target, precision=precision)
    from llama_adapter.app.doctor.encoder import diagnose_with_encoder

    return diagnose_with_encoder(target, encoder)


def _not_tried(unusable: list[str]) -> Finding:
    return Finding(
        level="not tried", what="model", sentence=f"Without {', '.join(unusable)} the model cannot be looked at"
    )
