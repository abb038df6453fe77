"""What the doctor found out about a model and its encoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from llama_adapter.runtime.errors import CheckpointError, GraphError

Level = Literal["ok", "not tried", "warning", "error"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at, what was seen in one sentence, and what to do about it."""

    level: Level
    what: str
    sentence: str
    hint: str = ""


class Report:
    """Findings in the order of the checks. A check that raises becomes a finding, and the next one is still made."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, level: Level, what: str, sentence: str, hint: str = "") -> None:
        """Add one finding."""
        self.findings.append(Finding(level=level, what=what, sentence=sentence, hint=hint))

    def attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """The result of `action`; None after a CheckpointError or GraphError, which becomes a finding."""
        try:
            return action()
        except (CheckpointError, GraphError) as fault:
            # By default the hint is to run the doctor.
            self.add("error", what, fault.message, "" if fault.hint == CheckpointError.default_hint else fault.hint)
            return None

    def passes(self, what: str, check: Callable[[], object]) -> bool:
        """Whether `check` raises neither error; if it does, that becomes a finding."""
        before = len(self.findings)
        self.attempt(what, check)
        return len(self.findings) == before

    @property
    def has_errors(self) -> bool:
        """Whether a finding is an error."""
        return any(finding.level == "error" for finding in self.findings)
