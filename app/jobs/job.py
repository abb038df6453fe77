"""One run of `caption` or `ask`, as plain values that can be pickled."""

from dataclasses import dataclass, field
from typing import Literal

from llama_adapter.app.calibration.decisions import Rule
from llama_adapter.app.inputs import InputSpec
from llama_adapter.app.models.spec import DEFAULT_PICTURE_TIMEOUT_S, CaptionerSpec, ReaderKind
from llama_adapter.app.tasks.question import Question
from llama_adapter.llm.engine.sampling_params import SamplingParams

MAX_TIMEOUT_S = 1_000_000  # eleven days; of some thousand times that the system knows nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is asked of which pictures, and where the answers go."""

    spec: CaptionerSpec
    inputs: InputSpec
    questions: tuple[Question, ...]  # of every picture that brings none of its own
    needs_question: bool = False  # a picture that nothing is asked of has failed; else it is captioned
    sampling: SamplingParams = field(default_factory=SamplingParams)
    out: str | None = None
    format: Literal["text", "jsonl"] | None = None
    threshold: float | None = None  # these three decide on choices where they are shown as text; records keep them all
    abstain: tuple[float, float] | None = None
    calibration: str | None = None  # a file
    overwrite: bool = False  # what `out` holds already is thrown away
    retry_errors: bool = False  # pictures that failed in an earlier run are tried again
    max_errors: int | None = None  # after so many failures no more pictures are begun
    reader: ReaderKind = "process"
    picture_timeout_s: float = DEFAULT_PICTURE_TIMEOUT_S  # to read one picture, in a process
    profile: Literal["wait", "marks"] | None = None
    quiet: bool = False

    @property
    def lacks_question(self) -> bool:
        """Whether what is asked has to come with the pictures."""
        return self.needs_question and self.questions[0].is_caption

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError("questions must be at least one")
        Rule.from_flags(self.threshold, self.abstain)  # refuses numbers out of range
        if self.max_errors is not None and self.max_errors < 1:
            raise ValueError(f"max_errors must be at least 1, got {self.max_errors}")
        if not 0 < self.picture_timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"picture_timeout_s must be above 0 and at most {MAX_TIMEOUT_S:,}, got {self.picture_timeout_s}"
            )
        if self.out is None and (self.overwrite or self.retry_errors):
            raise ValueError("overwrite and retry_errors go with out, which is missing")
