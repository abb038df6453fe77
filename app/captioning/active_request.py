"""A question about one picture while it is being answered."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
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


class ActiveRequest:
    """One question, and its answer so far. `CaptionLoop` takes it through encoder and engine."""

    def __init__(
        self,
        *,
        index: int,
        picture: str,
        digest: str,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        task: Task = FREE_TEXT,
        stop: Sequence[str] = (),
        started: float | None = None,
        ms: dict[str, float] | None = None,
        tag: Any = None,
        with_logprobs: bool = False,
        num_top_logprobs: int = 0,
        notes: tuple[PictureNote, ...] = (),
    ) -> None:
        """`started`: the `time.perf_counter()` from which times count; None means now. `ms`: times measured so far."""
        self.index, self.picture, self.digest = index, picture, digest
        self.prompt, self.task, self.tag = prompt, task, tag
        if not sampling.greedy and sampling.seed is None:
            # With a fixed seed, the answer continues unchanged after an out-of-memory restart.
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        self.sampling = sampling
        self.started = time.perf_counter() if started is None else started
        self.ms: dict[str, float] = {} if ms is None else ms
        self.notes = notes  # of the reader, for the record
        self.is_reused = False  # the encoded picture came from the cache
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self._num_told = 0  # token ids already sent in a `TextDelta`
        self.with_logprobs, self.num_top_logprobs = with_logprobs, num_top_logprobs
        self.logprobs: list[TokenLogprob] = []
        self.stop = StopStrings((*prompt.stop, *stop, *sampling.stop))
        # Set by `CaptionLoop.submit`:
        self.detokenizer: IncrementalDetokenizer | None = None
        self.prefix: Prefix | None = None
        self.unfamiliar: bool | None = None
        self.squares: tuple[Square, ...] = ()

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
        text = self.stop.push(text)
        if self.stop.is_hit:
            finish = "stop"
        elif finish in ("stop", "length"):
            text += self.stop.flush()
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
            unfamiliar=self.unfamiliar,
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
