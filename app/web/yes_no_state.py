"""What a page remembers of the Yes/No tab. Plain values, no Gradio."""

from collections.abc import Mapping
from dataclasses import dataclass

from llama_adapter.app.calibration.decisions import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One picture and how likely each choice is, or why that is not known; neither while it is under way."""

    name: str
    thumbnail: str | None = None  # a `data:` address
    choice: Mapping[str, float] | None = None
    problem: str | None = None
    is_reused: bool = False
    unfamiliar: bool | None = None  # as of an answer

    @property
    def is_open(self) -> bool:
        """Whether more may come."""
        return self.choice is None and self.problem is None


class YesNoSession:
    """What one page judged last, so that the sliders decide anew without asking again."""

    def __init__(self) -> None:
        self.judged: tuple[Judged, ...] = ()
        self.choices: tuple[str, ...] = ()
        self.rule = Rule()  # as the sliders stand, also while answers come
        self.run: object | None = None  # whoever may write
