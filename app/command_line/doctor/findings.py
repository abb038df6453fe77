"""The findings of `doctor` on a model and its encoder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from llama_adapter.runtime.errors import CheckpointError, GraphError

Level = Literal["ok", "not tried", "warning", "error"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of a check: `what` was checked, the result in one `sentence`, and a `hint` on what to do."""

    level: Level
    what: str
    sentence: str
    hint: str = ""


class Report:
    """Findings in the order of the checks. An error in a check becomes a finding, and later checks still run."""

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
            # The default hint, to run `doctor`, is left out.
            self.add("error", what, fault.message, "" if fault.hint == CheckpointError.default_hint else fault.hint)
            return None

    def passes(self, what: str, check: Callable[[], object]) -> bool:
        """Whether `check` raises neither error. An error that it raises becomes a finding."""
        before = len(self.findings)
        self.attempt(what, check)
        return len(self.findings) == before

    @property
    def has_errors(self) -> bool:
        """Whether a finding is an error."""
        return any(finding.level == "error" for finding in self.findings)
