"""One run of `caption`, `ask` or `generate` as plain values that can be pickled."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec, PictureInput
from llama_adapter.app.pictures.reading.spec import DEFAULT_PICTURE_TIMEOUT_S, DEFAULT_READER, ReaderKind
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.runtime.given import require_least

MAX_TIMEOUT_S = 1_000_000  # eleven days; the operating system refuses timeouts about a thousand times longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Which questions about which pictures, and where the answers go."""

    spec: CaptionerSpec
    inputs: InputSpec
    questions: tuple[Question, ...]  # asked about every picture that has no questions itself
    # If given, these replace the pictures that `inputs` name. They have their own questions, without {variables}, and
    # some have no picture.
    items: tuple[PictureInput, ...] | None = None
    is_encoding: bool = False  # pictures are encoded, and their own questions are not asked
    needs_question: bool = False  # whether a picture without a question fails; if False, it is captioned
    text_prefix: TextPrefix | None = None  # for prompts without a picture; None: as in the model's training
    sampling: SamplingParams = field(default_factory=SamplingParams)
    out: str | None = None
    format: Literal["text", "jsonl"] | None = None
    threshold: float | None = None  # this field and the next two are for text output; records keep all choices
    abstain: tuple[float, float] | None = None
    calibration: str | None = None  # path of a calibration file
    paddlenlp_out: str | None = None  # the file for answers in PaddleNLP's format, made of the records at the end
    overwrite: bool = False  # delete the records in `out` first
    n: int = 1  # answers to each question, each with a record
    logprobs: int | None = None  # add the log-probabilities of tokens to each record, and of so many likeliest ones
    output_ids: bool = False  # add the token ids of the text to each record
    retry_errors: bool = False  # try pictures again that failed in an earlier run
    max_errors: int | None = None  # begin no more pictures after this many failures
    reader: ReaderKind = DEFAULT_READER
    picture_timeout_s: float = DEFAULT_PICTURE_TIMEOUT_S  # per picture; only with reader "process"
    profile: Literal["wait", "marks"] | None = None
    trace: str | None = None  # the folder that receives a trace of the first stages
    quiet: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # by section and key, for the manifest

    @property
    def fills_variables(self) -> bool:
        """Whether {names} in questions are replaced. Without pictures, braces in prompts are plain text."""
        return not self.inputs.is_text and self.items is None

    @property
    def has_texts(self) -> bool:
        """Whether prompts without a picture are among the inputs."""
        return self.inputs.is_text or any(item.source is None for item in self.items or ())

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError("questions must be at least one")
        if self.out == "-":
            raise ValueError("out names a file or folder, got -; answers go to stdout without it")
        if self.paddlenlp_out is not None:
            if self.out is None:
                raise ValueError("paddlenlp_out goes with out: it is made of the records there")
            if os.path.realpath(self.paddlenlp_out) in map(os.path.realpath, (self.out, *self.inputs.prompt_files)):
                raise ValueError(f"paddlenlp_out would replace {self.paddlenlp_out}, which this run needs")
        Rule.from_flags(self.threshold, self.abstain)  # raises for numbers out of range
        require_least(self, "max_errors", "n")
        require_least(self, "logprobs", least=0)
        if not 0 < self.picture_timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"picture_timeout_s must be above 0 and at most {MAX_TIMEOUT_S:,}, got {self.picture_timeout_s}"
            )
        if self.out is None and (self.overwrite or self.retry_errors):
            raise ValueError("overwrite and retry_errors go with out, which is missing")
