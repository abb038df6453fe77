"""A question about one picture while it is being answered."""

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_adapter.app.captioning.encoded_pictures import Square
from llama_adapter.app.captioning.tasks.answers import FAILURES, Answer, Event, TextDelta, TokenLogprob
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.llm.engine.requests import Output
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.tokenizer import IncrementalDetokenizer
from llama_adapter.vision.formats import PictureNote


@dataclass(kw_only=True, eq=False)
class ActiveRequest:
    """One question, and its answer so far. `CaptionLoop` takes it through encoder and engine."""

    index: int
    picture: str
    digest: str
    prompt: EncodedPrompt
    sampling: SamplingParams
    task: Task = FREE_TEXT
    stop: Sequence[str] = ()  # beside those of the prompt and of `sampling`
    started: float = field(default_factory=time.perf_counter)  # from which times count
    ms: dict[str, float] = field(default_factory=dict)  # times measured so far
    tag: Any = None
    num_logprobs: int | None = None  # see `GenerateRequest`
    notes: tuple[PictureNote, ...] = ()  # of the reader, for the record
    is_reused: bool = False  # the encoded picture came from the cache
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # Set by `CaptionLoop.submit`:
    detokenizer: IncrementalDetokenizer | None = None
    prefix: Prefix | None = None
    find_unfamiliar: Callable[[], bool] | None = None
    squares: tuple[Square, ...] = ()

    def __post_init__(self) -> None:
        if not self.sampling.greedy and self.sampling.seed is None:
            # With a fixed seed, the answer continues unchanged after an out-of-memory restart.
            self.sampling = dataclasses.replace(self.sampling, seed=secrets.randbits(63))
        self._stopping = StopStrings((*self.prompt.stop, *self.stop, *self.sampling.stop))
        self._num_told = 0  # token ids already sent in a `TextDelta`

    def elapsed_ms(self) -> float:
        """Milliseconds since the request started."""
        return (time.perf_counter() - self.started) * 1e3

    def take(self, output: Output) -> list[Event]:
        """Take an output of the engine; returns its new text, and the answer if it is complete.

        A stop string completes the answer too.
        """
        assert self.detokenizer is not None
        finish, text = output.finish, ""
        if output.token_id is not None:
            self.ms.setdefault("first_token", self.elapsed_ms())
            self.token_ids.append(output.token_id)
            others = {token: self.detokenizer.peek(token) for token, _ in output.top}
            text = self.detokenizer.push(output.token_id)
            top = tuple((others[token], logprob) for token, logprob in output.top)
            self.logprobs += [TokenLogprob(text, logprob, top) for logprob in output.logprobs]
        if finish in ("stop", "length"):
            text += self.detokenizer.flush()
        text = self._stopping.push(text)
        if self._stopping.is_hit:
            finish = "stop"
        elif finish in ("stop", "length"):
            text += self._stopping.flush()
        events: list[Event] = []
        if text:
            self.pieces.append(text)
            new_ids, logprobs = tuple(self.token_ids[self._num_told :]), tuple(self.logprobs[self._num_told :])
            self._num_told += len(new_ids)
            events.append(TextDelta(index=self.index, text=text, token_ids=new_ids, logprobs=logprobs))
        if finish in FAILURES:
            events.append(self.failed(FAILURES[finish]))
        elif finish is not None:
            answer = self._answer(finish="length" if finish == "length" else "stop")
            events.append(self.task.complete(answer, prompt=self.prompt, logprobs=output.logprobs))
        return events

    def failed(self, error: AnswerError, *, keep_text: bool = False) -> Answer:
        """The answer after a failure; `keep_text` keeps the text so far and its times."""
        answer = self._answer(finish="error", error=error)
        if keep_text:
            return answer
        return dataclasses.replace(answer, text="", token_ids=(), logprobs=(), ms={"total": answer.ms["total"]})

    def _answer(self, *, finish: Literal["stop", "length", "error"], error: AnswerError | None = None) -> Answer:
        return Answer(
            index=self.index,
            picture=self.picture,
            digest=self.digest,
            prompt=self.prompt.text,
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            finish=finish,
            error=error,
            ms={**self.ms, "total": self.elapsed_ms()},
            prompt_tokens=len(self.prompt.token_ids),
            unfamiliar=None if self.find_unfamiliar is None else self.find_unfamiliar(),
            is_reused=self.is_reused,
            tag=self.tag,
            logprobs=tuple(self.logprobs),
            details={
                **({"prompt_tokens_cut": self.prompt.num_cut} if self.prompt.num_cut else {}),
                **dict.fromkeys(self.notes, True),
            },
        )


class StopStrings:
    """Passes a stream of text through, up to the first stop string. Holds back text that may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._held = ""
        self.is_hit = False

    def push(self, text: str) -> str:
        """Take the next piece of the stream; returns the text that cannot belong to a stop string."""
        if not self._stops or self.is_hit:
            return "" if self.is_hit else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_hit, self._held = True, ""
            return text[: min(places)]
        num_held = max(_num_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """End the stream; returns the text held back."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
