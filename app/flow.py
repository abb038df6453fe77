"""Prompts about pictures on their way through encoder and engine: conversations in, news out.

A captioner drives it over a folder, a service over requests as they come. One thread only.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from app.answers import NOT_FINITE, Answer, AnswerError, Event, TextDelta
from app.clock import StageClock
from app.prompts import EncodedPrompt
from app.stopping import StopTexts
from llm.engine.engine import Engine
from llm.engine.sampling_params import SamplingParams
from llm.engine.sequence import Output, Request
from llm.model.adapter import Prefix
from llm.tokenizer import IncrementalDetokenizer, Tokenizer
from vision.backends.base import VisionBackend


class Conversation:
    """One prompt about one picture, and what has been answered so far."""

    def __init__(
        self,
        *,
        index: int,
        picture: str,
        digest: str,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        choices: tuple[str, ...] | None,
        stop: Sequence[str] = (),
        started: float | None = None,
        ms: dict[str, float] | None = None,
        is_reused: bool = False,
    ) -> None:
        """`started`: the `time.perf_counter()` that its times count from, None is now; `ms`: those that are known."""
        self.index, self.picture, self.digest = index, picture, digest
        self.prompt, self.sampling, self.choices = prompt, sampling, choices
        self.started = time.perf_counter() if started is None else started
        self.ms: dict[str, float] = {} if ms is None else ms
        self.is_reused = is_reused
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.stopping = StopTexts(stop)
        self.detokenizer: IncrementalDetokenizer | None = None  # from `Flow.submit` on

    def elapsed_ms(self) -> float:
        """Milliseconds since it started."""
        return (time.perf_counter() - self.started) * 1e3

    def failed(self, error: AnswerError, *, keep_text: bool = False) -> Answer:
        """Its end without a whole answer; with `keep_text`, what there is of it and of its times stays."""
        return Answer(
            index=self.index,
            picture=self.picture,
            digest=self.digest,
            prompt=self.prompt.text,
            text="".join(self.pieces) if keep_text else "",
            token_ids=tuple(self.token_ids) if keep_text else (),
            finish="error",
            error=error,
            ms={**(self.ms if keep_text else {}), "total": self.elapsed_ms()},
            prompt_tokens=len(self.prompt.token_ids),
            is_reused=self.is_reused,
        )


class Flow:
    """What is under way in one engine. Close it before another one is opened on the same engine."""

    _ids = itertools.count()  # of all flows: a step may still speak of requests that an earlier one left behind

    def __init__(self, *, vision: VisionBackend, engine: Engine, tokenizer: Tokenizer, clock: StageClock) -> None:
        self._vision, self._engine, self._tokenizer, self._clock = vision, engine, tokenizer, clock
        self._engine.timer = clock
        self._in_flight: dict[int, Conversation] = {}

    @property
    def num_unfinished(self) -> int:
        """Conversations that `step` has still to answer."""
        return self._engine.num_unfinished

    @property
    def num_free(self) -> int:
        """How many more may be submitted so that none waits for a slot."""
        return max(0, self._engine.num_slots - self._engine.num_unfinished)

    def encode(self, pixels: Sequence[np.ndarray]) -> tuple[list[Prefix], float]:
        """Pixels (size, size, 3) of pictures, uint8 -> what the decoder reads of each, and the encoder's milliseconds.

        The prefixes are views of one tensor.
        """
        self._clock.enter("clip")
        started = time.perf_counter()
        visual_query_BQD = self._vision.encode(np.stack(pixels))
        clip_ms = (time.perf_counter() - started) * 1e3
        self._clock.enter("pre")
        return self._engine.project_prefix(visual_query_BQD), clip_ms

    def submit(self, conversation: Conversation, prefix: Prefix) -> int:
        """Hand a conversation to the engine; returns what `cancel` takes."""
        request_id = next(Flow._ids)
        conversation.detokenizer = IncrementalDetokenizer(self._tokenizer)
        self._engine.submit(
            Request(
                id=request_id,
                prompt_ids=conversation.prompt.token_ids,
                prefix=prefix,
                sampling=conversation.sampling,
                choices=conversation.prompt.choices,
            )
        )
        self._in_flight[request_id] = conversation
        return request_id

    def cancel(self, request_id: int) -> None:
        """Forget a conversation; its slot is free at once. Unknown ids are ignored."""
        if self._in_flight.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def step(self) -> list[Event]:
        """One step of the engine, and what it means for readers: new text, answers."""
        outputs = self._engine.step()
        self._clock.enter("decode")
        return [event for output in outputs for event in self._news(output)]

    def close(self) -> None:
        """Forget what is under way; harmless when repeated."""
        for request_id in list(self._in_flight):
            self.cancel(request_id)
        self._clock.stop()

    def _news(self, output: Output) -> Iterator[Event]:
        conversation = self._in_flight[output.request_id]
        assert conversation.detokenizer is not None
        finish = output.finish
        text = ""
        if output.token_id is not None:
            conversation.ms.setdefault("first_token", conversation.elapsed_ms())
            conversation.token_ids.append(output.token_id)
            text = conversation.detokenizer.push(output.token_id)
        if finish in ("stop", "length"):
            text += conversation.detokenizer.flush()
        text = conversation.stopping.push(text)
        if conversation.stopping.is_hit:
            if finish is None:
                self._engine.cancel(output.request_id)
            finish = "stop"
        elif finish in ("stop", "length"):
            text += conversation.stopping.flush()
        if text:
            conversation.pieces.append(text)
            yield TextDelta(index=conversation.index, text=text)
        if finish is None:
            return
        del self._in_flight[output.request_id]
        if finish == "not_finite":
            yield conversation.failed(NOT_FINITE)
            return
        conversation.ms["total"] = conversation.elapsed_ms()
        choice = self._choose(conversation, output.choice_logprobs) if finish == "choice" else None
        yield Answer(
            index=conversation.index,
            picture=conversation.picture,
            digest=conversation.digest,
            prompt=conversation.prompt.text,
            text="".join(conversation.pieces),
            token_ids=tuple(conversation.token_ids),
            finish=finish,
            choice=choice,
            ms=conversation.ms,
            prompt_tokens=len(conversation.prompt.token_ids),
            is_reused=conversation.is_reused,
        )

    def _choose(self, conversation: Conversation, logprobs: Sequence[float]) -> dict[str, float]:
        """Make the likeliest choice the answer; returns the probability of each."""
        assert conversation.choices is not None
        probabilities = _normalised(logprobs)
        best = probabilities.index(max(probabilities))
        conversation.pieces = [conversation.choices[best]]
        conversation.token_ids = list(conversation.prompt.choices[best])
        if conversation.token_ids[-1] == self._tokenizer.eos_id:
            conversation.token_ids.pop()
        return dict(zip(conversation.choices, probabilities, strict=True))


def _normalised(logprobs: Sequence[float]) -> list[float]:
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
