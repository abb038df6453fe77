"""The main flow, top to bottom: pictures and prompts -> visual queries -> requests -> answers."""

import itertools
import math
import operator
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from app.clock import Mark, StageClock
from app.reading import ReadAhead
from app.spec import CaptionerSpec, Precision
from llm.engine.engine import Engine
from llm.engine.sampling_params import SamplingParams
from llm.engine.sequence import Output, Request
from llm.prompt import format_prompt
from llm.runtime.executor import WarmUp
from llm.tokenizer import IncrementalDetokenizer, Tokenizer
from vision.backends.base import VisionBackend
from vision.errors import PictureError
from vision.image import PictureSource, load_picture
from vision.preprocess import preprocess

MAX_REMEMBERED_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text that goes to the model as it is, without the instruction template."""

    text: str


# An instruction, an instruction with its input, text without a template, or token ids used as they are.
Prompt = str | tuple[str, str | None] | RawPrompt | Sequence[int]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One picture and what is asked of it."""

    index: int
    picture: PictureSource
    label: str
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerError:
    """Why a picture has no answer."""

    code: str
    message: str


NOT_FINITE = AnswerError(
    code="not_finite",
    message="The model's numbers are not finite: they overflowed (try float32), or weights are damaged (try doctor).",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one work item; with `error`, there is none and the text is empty."""

    index: int
    picture: str
    digest: str  # of the picture's bytes; empty when they could not be read
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length", "choice", "error"]
    choice: dict[str, float] | None = None  # probability of each choice, they sum to 1
    error: AnswerError | None = None
    ms: dict[str, float] = field(
        default_factory=dict
    )  # read, clip (its batch's, as the host saw it), first_token, total


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """The next piece of an answer's text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    text: str  # as a record shows it
    token_ids: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Reading:
    """A picture as it was read, or why it was not."""

    item: WorkItem
    digest: str
    pixels: np.ndarray | None
    error: AnswerError | None
    elapsed_ms: float


class _Conversation:
    """A work item on its way through the engine. Its time is that of reading, and what follows from here on."""

    def __init__(self, reading: _Reading, prompt: _EncodedPrompt, *, tokenizer: Tokenizer) -> None:
        self.item, self.prompt = reading.item, prompt
        self.started = time.perf_counter() - reading.elapsed_ms / 1e3
        self.digest = reading.digest
        self.token_ids: list[int] = []
        self.detokenizer = IncrementalDetokenizer(tokenizer)
        self.pieces: list[str] = []
        self.ms: dict[str, float] = {"read": reading.elapsed_ms}

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3


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
    ) -> None:
        self.spec, self.info, self.tokenizer = spec, info, tokenizer
        self._synchronise, self._mark = synchronise, mark
        self._vision, self._engine = vision, engine
        self._request_ids = itertools.count()
        self._is_running = False
        # Who trained on OpenCV's order of colours read with OpenCV, which gives plain colours before any resizing.
        self._convert: Literal["last", "first"] = "first" if spec.channel_order == "bgr" else "last"
        # Twice the size, so that the last step still averages over what is there.
        self._least_side = 2 * vision.image_size if spec.reading == "fast" else None
        self._encoded_prompts: dict[tuple[Prompt, tuple[str, ...] | None], _EncodedPrompt] = {}

    @classmethod
    def load(cls, model: str | os.PathLike[str] | None = None, **options: Any) -> "Captioner":
        """Load a bundle (default: the embedded model) or, with `llama_dir`, checkpoints as users have them.

        `options` are the fields of `CaptionerSpec`: llama_dir, llama_type, adapter, clip, visual_heads,
        channel_order, context, vision, encoder, encoder_process, encoder_device, device, dtype, precision, mode,
        operators, exif, reading, batch_size; None leaves a default. Raises ValueError for options that exclude each
        other, and the errors listed in app/errors.py for files and devices.
        """
        from app.assemble import assemble

        given = {name: value for name, value in {"model": model, **options}.items() if value is not None}
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        for name in {"device", "dtype"} & plain.keys():  # torch.device("cpu") and torch.float16 are meant as well
            plain[name] = str(plain[name]).removeprefix("torch.")
        return assemble(CaptionerSpec(**plain))

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
    ) -> Generator[TextDelta | Answer]:
        """As `generate`, token by token: text deltas of all pictures as they come, and each picture's answer.

        One stream at a time: close it or read it to its end before the next call.
        """
        choices = _as_choices(choices)
        items = work_items(pictures, prompts, default_prompt=self.info.default_prompt)
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        for item in items:
            self.check_prompt(item.prompt, choices)  # an error here must come before any work
        return self.run(items, sampling=sampling, choices=choices, clock=clock)

    def run(
        self,
        items: Iterable[WorkItem],
        *,
        sampling: SamplingParams,
        choices: Sequence[str] | None = None,
        clock: StageClock | None = None,
    ) -> Generator[TextDelta | Answer]:
        """Answer a stream of work items as they come, in completion order; memory does not grow with their number.

        Closing the iterator early forgets what is in flight. Raises RuntimeError while another run is open.
        """
        if self._is_running:
            raise RuntimeError("This Captioner is still answering another call: read its stream to the end or close it")
        choices = _as_choices(choices)
        clock = clock or StageClock()
        self._engine.timer = clock
        self._is_running = True
        in_flight: dict[int, _Conversation] = {}
        exhausted = False
        batch_size = self.spec.batch_size
        reader = ReadAhead(iter(items), self._read, ahead=2 * batch_size, shareable=_is_shareable)
        try:
            while True:
                # Keep every slot in use: encode the next pictures while fewer requests than slots are under way.
                while not exhausted and self._engine.num_unfinished < self._engine.num_slots:
                    clock.enter("read")
                    batch = reader.take(batch_size)
                    exhausted = len(batch) < batch_size
                    errors = self._admit(batch, in_flight, sampling=sampling, choices=choices, clock=clock)
                    clock.enter("write")
                    yield from errors
                if not self._engine.num_unfinished:
                    return
                outputs = self._engine.step()
                clock.enter("decode")
                events = [event for output in outputs for event in self._news(output, in_flight, choices)]
                clock.enter("write")
                yield from events
        finally:
            reader.close()
            for request_id in in_flight:
                self._engine.cancel(request_id)
            clock.stop()
            self._is_running = False

    def _read(self, item: WorkItem) -> _Reading:
        """Read and resize one picture; in a thread of its own."""
        started = time.perf_counter()
        digest, pixels, problem = "", None, None
        try:
            loaded = load_picture(item.picture, orientation=self.spec.exif, least_side=self._least_side)
            digest = loaded.digest
            pixels = preprocess(loaded.image, size=self.image_size, convert=self._convert, reading=self.spec.reading)
        except PictureError as error:
            digest = digest or error.digest
            problem = AnswerError(code=error.code, message=error.message)
        return _Reading(item, digest, pixels, problem, (time.perf_counter() - started) * 1e3)

    def _admit(
        self,
        readings: Sequence[_Reading],
        in_flight: dict[int, _Conversation],
        *,
        sampling: SamplingParams,
        choices: tuple[str, ...] | None,
        clock: StageClock,
    ) -> list[Answer]:
        """Encode pictures and hand them to the engine; returns the answers of those that could not be read."""
        errors: list[Answer] = []
        readable: list[_Conversation] = []
        pixels: list[np.ndarray] = []
        for reading in readings:
            prompt = self._encode_prompt(reading.item.prompt, choices)
            conversation = _Conversation(reading, prompt, tokenizer=self.tokenizer)
            if reading.pixels is None:
                assert reading.error is not None, "a picture without pixels has an error"
                errors.append(_failed(conversation, reading.error))
                continue
            pixels.append(reading.pixels)
            readable.append(conversation)
        if not readable:
            return errors
        clock.enter("clip")
        encode_started = time.perf_counter()
        visual_query_BQD = self._vision.encode(np.stack(pixels))
        clip_ms = (time.perf_counter() - encode_started) * 1e3
        clock.enter("pre")
        prefixes = self._engine.project_prefix(visual_query_BQD)
        for conversation, prefix in zip(readable, prefixes, strict=True):
            conversation.ms["clip"] = clip_ms
            request_id = next(self._request_ids)
            in_flight[request_id] = conversation
            self._engine.submit(
                Request(
                    id=request_id,
                    prompt_ids=conversation.prompt.token_ids,
                    prefix=prefix,
                    sampling=sampling,
                    choices=conversation.prompt.choices,
                )
            )
        return errors

    def _news(
        self, output: Output, in_flight: dict[int, _Conversation], choices: tuple[str, ...] | None
    ) -> Iterator[TextDelta | Answer]:
        """What one output of the engine means for the reader: new text, the answer, or both."""
        conversation = in_flight[output.request_id]
        text = ""
        if output.token_id is not None:
            conversation.ms.setdefault("first_token", conversation.elapsed_ms())
            conversation.token_ids.append(output.token_id)
            text = conversation.detokenizer.push(output.token_id)
        if output.finish in ("stop", "length"):
            text += conversation.detokenizer.flush()
        if text:
            conversation.pieces.append(text)
            yield TextDelta(index=conversation.item.index, text=text)
        if output.finish is None:
            return
        del in_flight[output.request_id]
        if output.finish == "not_finite":
            yield _failed(conversation, NOT_FINITE)
            return
        conversation.ms["total"] = conversation.elapsed_ms()
        choice = None
        if output.finish == "choice":
            assert choices is not None
            probabilities = _normalised(output.choice_logprobs)
            choice = dict(zip(choices, probabilities, strict=True))
            best = probabilities.index(max(probabilities))
            conversation.pieces, conversation.token_ids = [choices[best]], list(conversation.prompt.choices[best])
            if conversation.token_ids[-1] == self.tokenizer.eos_id:
                conversation.token_ids.pop()
        yield Answer(
            index=conversation.item.index,
            picture=conversation.item.label,
            digest=conversation.digest,
            prompt=conversation.prompt.text,
            text="".join(conversation.pieces),
            token_ids=tuple(conversation.token_ids),
            finish=output.finish,
            choice=choice,
            ms=conversation.ms,
        )

    def warm_up(self, prompt: Prompt | None = None, *, max_new_tokens: int = SamplingParams.max_new_tokens) -> WarmUp:
        """Run what answers to such a prompt need, so that the first picture does not wait for programs to compile.

        It pays for graph modes. Raises as `check_prompt`, and RuntimeError while answers are under way.
        """
        encoded = self._encode_prompt(self.info.default_prompt if prompt is None else prompt, None)
        return self._engine.warm_up(prompt_tokens=len(encoded.token_ids), new_tokens=max_new_tokens)

    def check_prompt(self, prompt: Prompt, choices: Sequence[str] | None = None) -> None:
        """Raise PromptTooLongError, PromptError or ValueError when this prompt could not be answered."""
        self._encode_prompt(prompt, _as_choices(choices))

    def _encode_prompt(self, prompt: Prompt, choices: tuple[str, ...] | None) -> _EncodedPrompt:
        """Most runs ask few different questions: each is tokenised once."""
        key = _hashable(prompt), choices
        if key not in self._encoded_prompts:
            if len(self._encoded_prompts) >= MAX_REMEMBERED_PROMPTS:
                self._encoded_prompts.clear()
            self._encoded_prompts[key] = self._tokenise(key[0], choices)
        return self._encoded_prompts[key]

    def _tokenise(self, prompt: Prompt, choices: tuple[str, ...] | None) -> _EncodedPrompt:
        """Token ids of a prompt and its choices; raises as `Engine.check`, and ValueError for a prompt of no kind."""
        model_text: str | None
        match prompt:
            case str(instruction):
                shown, model_text = instruction, format_prompt(instruction)
            case RawPrompt(str(text)):
                shown, model_text = text, text
            case (str(instruction), None):
                shown, model_text = instruction, format_prompt(instruction)
            case (str(instruction), str(given)):
                shown, model_text = f"{instruction}\n{given}", format_prompt(instruction, given)
            case _:
                shown, model_text = "", None
        token_ids = _as_token_ids(prompt) if model_text is None else self.tokenizer.encode(model_text)
        choice_ids: tuple[tuple[int, ...], ...] = ()
        if choices is not None:
            choice_ids = tuple(tuple(self.tokenizer.encode_continuation(model_text, text)) for text in choices)
            if _some_begins_with_another(choice_ids):
                # "1" would always beat "10": with the end token it has to be the whole answer.
                choice_ids = tuple((*ids, self.tokenizer.eos_id) for ids in choice_ids)
        self._engine.check(tuple(token_ids), choice_ids)
        if model_text is None:
            shown = self.tokenizer.decode(token_ids)
        return _EncodedPrompt(shown, tuple(token_ids), choice_ids)


def work_items(
    pictures: Sequence[PictureSource], prompts: Sequence[Prompt] | str | RawPrompt | None, *, default_prompt: str
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
        WorkItem(index=index, picture=picture, label=_label(picture, index), prompt=prompt)
        for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True))
    ]


def _label(picture: PictureSource, index: int) -> str:
    return f"picture {index}" if isinstance(picture, bytes) or hasattr(picture, "getpixel") else str(picture)


def _is_shareable(item: WorkItem) -> bool:
    """Whether a picture may be read in another thread: an image object may stand in several items, or be in use."""
    return isinstance(item.picture, (str, bytes, os.PathLike))


def _hashable(prompt: Prompt) -> Prompt:
    """The prompt as a key of a cache: token ids become a tuple."""
    is_pair = isinstance(prompt, tuple) and len(prompt) > 0 and isinstance(prompt[0], str)
    return prompt if is_pair or isinstance(prompt, (str, RawPrompt)) else tuple(_as_token_ids(prompt))


def _as_choices(choices: Any) -> tuple[str, ...] | None:
    """Answers to choose from; raises ValueError unless they are at least two different texts."""
    if choices is None:
        return None
    texts = () if isinstance(choices, str) else tuple(choices)
    if isinstance(choices, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'choices must be a list of texts such as ["Yes", "No"], got {choices!r}')
    if len(texts) < 2 or len(set(texts)) < len(texts):
        raise ValueError(f"choices must be at least two different answers, got {list(texts)}")
    return texts


def _some_begins_with_another(choices: Sequence[tuple[int, ...]]) -> bool:
    return any(one != other and one == other[: len(one)] for one in choices for other in choices)


def _as_token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token_id) for token_id in prompt]
    except (TypeError, ValueError):
        raise ValueError(
            f"A prompt must be text, a pair (instruction, input) or a list of token ids, got {prompt!r}"
        ) from None


def _normalised(logprobs: Sequence[float]) -> list[float]:
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]


def _failed(conversation: _Conversation, error: AnswerError) -> Answer:
    return Answer(
        index=conversation.item.index,
        picture=conversation.item.label,
        digest=conversation.digest,
        prompt=conversation.prompt.text,
        text="",
        token_ids=(),
        finish="error",
        error=error,
        ms={"total": conversation.elapsed_ms()},
    )
