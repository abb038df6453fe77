"""The main loop, top to bottom: pictures and prompts -> visual queries -> requests -> answers."""

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from llama_adapter.app.captioning.active_request import ActiveRequest
from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.stage_clock import Mark, StageClock
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.models.oom_retry import OomRetry, attempt
from llama_adapter.app.models.out_of_distribution import OodDetector
from llama_adapter.app.models.spec import CaptionerSpec, Precision
from llama_adapter.app.reading.prefetch import Prefetcher
from llama_adapter.app.reading.reader import PictureReader, PictureReading, Reader
from llama_adapter.app.tasks.answers import Answer, AnswerError, Event, TextDelta
from llama_adapter.app.tasks.prompts import (
    EncodedPrompt,
    Prompt,
    PromptEncoder,
    RawPrompt,
    as_choices,
    shown_prompt,
)
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.runners.eager import WarmUp
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.vision.backends.base import VisionBackend
from llama_adapter.vision.image import PictureSource

# What callers of a captioner need, from one place.
__all__ = [
    "Answer",
    "AnswerError",
    "Captioner",
    "Event",
    "ModelInfo",
    "Prompt",
    "RawPrompt",
    "TextDelta",
    "WorkItem",
    "WorkQuestion",
    "work_items",
]

# Says which questions of an item are still to be answered, once its picture's digest is known ("" if it cannot be).
Wants = Callable[[WorkItem, str], tuple[WorkQuestion, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What a report or a record says of the model."""

    name: str
    digest: str
    device: str
    dtype: str
    precision: Precision  # of the linear layers' weights; all else is of the dtype
    vision: str  # what runs the encoder
    mode: str  # how the decoder's steps are run
    operators: str  # what they compute by
    encoder: str | None  # tells exported encoders apart; None for the model's own weights
    context: int
    default_prompt: str
    notes: tuple[str, ...] = ()  # for people: what is otherwise than they may think


class _Reading(NamedTuple):
    """An item whose picture was looked at, and what is left to be asked of it."""

    item: WorkItem
    questions: tuple[WorkQuestion, ...]
    picture: PictureReading


class Captioner:
    """Answers prompts about pictures. Not thread-safe: one call at a time."""

    def __init__(
        self,
        *,
        spec: CaptionerSpec,
        info: ModelInfo,
        vision: VisionBackend,
        engine: Engine,
        tokenizer: Tokenizer,
        synchronise: Callable[[], None],
        mark: Callable[[], Mark | None],
        oom_retry: OomRetry | None = None,
        ood_detector: OodDetector | None = None,
    ) -> None:
        """`spec` has nothing left open. Without `ood_detector`, no answer says whether its picture is unfamiliar."""
        self.spec, self.info, self.tokenizer = spec, info, tokenizer
        self.oom_retry = oom_retry or OomRetry()
        self._synchronise, self._mark = synchronise, mark
        self._vision, self._engine, self._ood_detector = vision, engine, ood_detector
        self._is_running = False
        self.reader: Reader = PictureReader(spec, size=vision.image_size)  # of calls that bring none; may be replaced
        self._prompts = PromptEncoder(tokenizer, check=engine.check)

    @classmethod
    def load(cls, model: str | os.PathLike[str] | None = None, **options: Any) -> "Captioner":
        """Load a bundle (default: the embedded model) or, with `llama_dir`, checkpoints as users have them.

        `options` are the fields of `CaptionerSpec`: llama_dir, llama_type, adapter, clip, visual_heads,
        channel_order, context, vision, encoder, encoder_process, encoder_device, device, dtype, precision, mode,
        operators, exif, reading, batch_size; None leaves a default. Raises ValueError for options that exclude each
        other, and the errors listed in runtime/problems.py for files and devices.
        """
        given = {name: value for name, value in {"model": model, **options}.items() if value is not None}
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        for name in {"device", "dtype"} & plain.keys():  # torch.device("cpu") and torch.float16 are meant as well
            plain[name] = str(plain[name]).removeprefix("torch.")
        return cls.from_spec(CaptionerSpec(**plain))

    @classmethod
    def from_spec(cls, spec: CaptionerSpec) -> "Captioner":
        """As `load`, from a spec."""
        from llama_adapter.app.captioning.assemble import assemble

        return assemble(spec)

    @property
    def batch_size(self) -> int:
        """How many are answered at once, where memory is enough."""
        return self._engine.num_slots

    @property
    def image_size(self) -> int:
        """Side of the square that the model sees of a picture, in pixels."""
        return self._vision.image_size

    def profile_clock(self, *, waits: bool = True) -> StageClock:
        """A clock to pass as `clock`: it waits for the device at every boundary, or else leaves marks in its queue.

        With marks, a stage's time on the device goes from the end of what came before to the end of its own work.
        """
        return StageClock(synchronise=self._synchronise) if waits else StageClock(mark=self._mark)

    def close(self) -> None:
        """Give back what an exported encoder holds: its device, thread or process. Harmless when repeated."""
        self._vision.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        pictures: Sequence[PictureSource],
        prompts: Sequence[Prompt] | str | RawPrompt | None = None,
        *,
        max_new_tokens: int = SamplingParams.max_new_tokens,
        temperature: float = SamplingParams.temperature,
        top_p: float = SamplingParams.top_p,
        top_k: int = SamplingParams.top_k,
        seed: int | None = None,
        choices: Sequence[str] | None = None,
        clock: StageClock | None = None,
    ) -> list[Answer]:
        """Answer each picture's prompt; answers come in the order of the pictures.

        `prompts` has one entry per picture, or a single one for all, or is None for the model's caption prompt. An
        entry is an instruction, a pair (instruction, input), a `RawPrompt`, or a list of token ids. A picture that
        cannot be read becomes an answer with `error`. With `choices` the answer is the likeliest of them.

        Raises ValueError for counts that do not match or settings out of range, PromptTooLongError or PromptError
        before anything is computed.
        """
        events = self.stream(
            pictures,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            choices=choices,
            clock=clock,
        )
        answers = [event for event in events if isinstance(event, Answer)]
        return sorted(answers, key=lambda answer: answer.index)

    def stream(
        self,
        pictures: Sequence[PictureSource],
        prompts: Sequence[Prompt] | str | RawPrompt | None = None,
        *,
        max_new_tokens: int = SamplingParams.max_new_tokens,
        temperature: float = SamplingParams.temperature,
        top_p: float = SamplingParams.top_p,
        top_k: int = SamplingParams.top_k,
        seed: int | None = None,
        choices: Sequence[str] | None = None,
        clock: StageClock | None = None,
    ) -> Generator[Event]:
        """As `generate`, token by token: text deltas of all pictures as they come, and each picture's answer.

        One stream at a time: close it or read it to its end before the next call.
        """
        items = work_items(pictures, prompts, default_prompt=self.info.default_prompt, choices=as_choices(choices))
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        for item in items:
            for question in item.questions:  # an error here must come before any work
                self.check_prompt(question.prompt, question.choices)
        return self.run(items, sampling=sampling, clock=clock)

    def run(
        self,
        items: Iterable[WorkItem],
        *,
        sampling: SamplingParams,
        clock: StageClock | None = None,
        reader: Reader | None = None,
        wants: Wants | None = None,
        may_wait: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        """Answer a stream of work items as they come, in completion order; memory does not grow with their number.

        Every question gives one answer, be it an error. `wants`, asked in reading threads, leaves questions out of it,
        and pictures without any unread. `reader` is another way to read than in threads of this process; it stays open.
        Items are drawn in the caller's thread or, where one `may_wait` for them, in one of their own: what came is
        answered meanwhile. Once `stop` says so, no more pictures are begun, and no items waited for in that thread.
        Closing the iterator early forgets what is in flight.

        Raises RuntimeError while another run is open, and what `items` raises, once all before that is answered.
        """
        clock = clock or StageClock()
        look = partial(_look, reader=reader or self.reader, wants=wants)
        with (
            self.open_loop(clock) as loop,
            Prefetcher(
                iter(items),
                look,
                ahead=2 * self.batch_size,
                shareable=_is_shareable,
                num_bytes=_carried_bytes,
                may_wait=may_wait,
                stop=stop,
            ) as prefetcher,
        ):
            while True:
                # The encoder is given many at once, and whoever ends this has no more than a batch to begin again.
                while not prefetcher.is_exhausted and (num_wanted := loop.num_wanted) and not stop():
                    clock.enter("read")
                    # Nobody waits for a picture while there are others to answer.
                    batch = prefetcher.take(num_wanted, at_least=0 if loop.num_unfinished else None)
                    if not batch:
                        break
                    errors = self._admit([reading for reading in batch if reading.questions], loop, sampling=sampling)
                    clock.enter("write")
                    yield from errors
                if not loop.num_unfinished:
                    return
                events = loop.step()
                clock.enter("write")
                yield from events

    @contextmanager
    def open_loop(self, clock: StageClock) -> Iterator[CaptionLoop]:
        """The way through this captioner's encoder and engine, for one user at a time; closed at the end.

        Raises RuntimeError while another one is open.
        """
        if self._is_running:
            raise RuntimeError("This Captioner is still answering another call: read its stream to the end or close it")
        self._is_running = True
        loop = CaptionLoop(
            vision=self._vision,
            engine=self._engine,
            tokenizer=self.tokenizer,
            clock=clock,
            oom_retry=self.oom_retry,
            ood_detector=self._ood_detector,
        )
        try:
            yield loop
        finally:
            loop.close()
            self._is_running = False

    def _admit(self, readings: Sequence[_Reading], loop: CaptionLoop, *, sampling: SamplingParams) -> list[Answer]:
        """Encode pictures and hand their questions to the engine; returns the answers of what cannot be asked."""
        errors: list[Answer] = []
        asked: list[tuple[np.ndarray, list[ActiveRequest]]] = []
        for reading in readings:
            conversations = []
            for question in reading.questions:
                conversation, error = self._begin(question, reading, sampling=sampling)
                if error is None:
                    conversations.append(conversation)
                else:
                    errors.append(conversation.failed(error))
            if conversations:
                assert reading.picture.pixels is not None, "a picture without pixels has an error"
                asked.append((reading.picture.pixels, conversations))
        if asked:
            encoded, clip_ms = loop.encode([pixels for pixels, _ in asked])
            for (_, conversations), picture in zip(asked, encoded, strict=True):
                for conversation in conversations:
                    conversation.ms["clip"] = clip_ms
                    loop.submit(conversation, picture)
        return errors

    def _begin(
        self, question: WorkQuestion, reading: _Reading, *, sampling: SamplingParams
    ) -> tuple[ActiveRequest, AnswerError | None]:
        """The conversation of a question, and why it cannot be had. Its time is that of reading, and what follows."""
        picture, error = reading.picture, reading.picture.error
        try:
            prompt = self.encode_prompt(question.prompt, question.choices)
        except (PromptError, PromptTooLongError, ValueError) as refusal:
            # One prompt of many, such as a line of a manifest: the others are answered all the same.
            prompt = EncodedPrompt(shown_prompt(question.prompt), (), ())
            error = error or AnswerError(code="prompt", message=str(refusal))
        conversation = ActiveRequest(
            index=question.index,
            picture=reading.item.label,
            digest=picture.digest,
            prompt=prompt,
            sampling=sampling,
            choices=question.choices,
            started=time.perf_counter() - picture.elapsed_ms / 1e3,
            ms={"read": picture.elapsed_ms},
            tag=question.tag,
        )
        return conversation, error

    def warm_up(self, prompt: Prompt | None = None, *, max_new_tokens: int = SamplingParams.max_new_tokens) -> WarmUp:
        """Run what answers to such a prompt need, so that the first picture does not wait for programs to compile.

        It pays for graph modes. Where memory is not enough for it, answers do without, and come with half the rows.
        Raises as `check_prompt`, and RuntimeError while answers are under way.
        """
        encoded = self.encode_prompt(self.info.default_prompt if prompt is None else prompt)
        engine = self._engine
        run = partial(engine.warm_up, prompt_tokens=len(encoded.token_ids), new_tokens=max_new_tokens)
        done = attempt(run, is_least=engine.num_rows == 1)
        if done is None:
            self.oom_retry.fewer_rows(engine, num_rows=engine.num_rows)
            return WarmUp(seconds=0.0, programs=0)
        return done

    def encode_prompt(self, prompt: Prompt, choices: Sequence[str] | None = None) -> EncodedPrompt:
        """A prompt and its choices as the engine takes them; from any thread.

        Raises PromptTooLongError, PromptError or ValueError when this prompt could not be answered.
        """
        return self._prompts.encode(prompt, as_choices(choices))

    def check_prompt(self, prompt: Prompt, choices: Sequence[str] | None = None) -> None:
        """Raise as `encode_prompt` does."""
        self.encode_prompt(prompt, choices)


def work_items(
    pictures: Sequence[PictureSource],
    prompts: Sequence[Prompt] | str | RawPrompt | None,
    *,
    default_prompt: str,
    choices: tuple[str, ...] | None = None,
) -> list[WorkItem]:
    """Pair pictures with prompts; a single prompt serves all pictures. Raises ValueError when the counts differ."""
    if isinstance(pictures, (str, bytes, os.PathLike)) or hasattr(pictures, "getpixel"):
        raise ValueError("pictures must be a list of pictures, got a single one: put it in brackets")
    if prompts is None or isinstance(prompts, (str, RawPrompt)):
        prompts = [default_prompt if prompts is None else prompts]
    pictures, prompts = list(pictures), list(prompts)
    if len(prompts) == 1:
        prompts = prompts * len(pictures)
    if len(prompts) != len(pictures):
        raise ValueError(f"{len(pictures)} pictures came with {len(prompts)} prompts: give one each, or one for all")
    return [
        WorkItem(
            picture=picture,
            label=_label(picture, index),
            questions=(WorkQuestion(index=index, prompt=prompt, choices=choices),),
        )
        for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True))
    ]


def _label(picture: PictureSource, index: int) -> str:
    return f"picture {index}" if isinstance(picture, bytes) or hasattr(picture, "getpixel") else str(picture)


def _look(item: WorkItem, *, reader: Reader, wants: Wants | None) -> _Reading:
    """Read an item's picture, as far as somebody wants to know of it."""
    if isinstance(item.picture, PictureReading):
        reading = item.picture
        return _Reading(item, item.questions if wants is None else wants(item, reading.digest), reading)
    if wants is None:
        return _Reading(item, item.questions, reader.read(item.picture, name=item.label))
    questions: tuple[WorkQuestion, ...] | None = None

    def wants_pixels(digest: str) -> bool:
        nonlocal questions
        questions = wants(item, digest)
        return bool(questions)

    reading = reader.read(item.picture, name=item.label, wants_pixels=wants_pixels)
    # Nobody was asked where the bytes could not be had, or where there is no telling before they are decoded.
    return _Reading(item, wants(item, reading.digest) if questions is None else questions, reading)


def _carried_bytes(item: WorkItem) -> int:
    """Of the pictures that wait to be read, those of compressed archives are in memory already."""
    return len(item.picture) if isinstance(item.picture, bytes) else 0


def _is_shareable(item: WorkItem) -> bool:
    """Whether a picture may be read in another thread: an image object may stand in several items, or be in use."""
    return not hasattr(item.picture, "getpixel")
