"""A question about one picture while it is being answered."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from llama_adapter.app.captioning.stop_strings import StopStrings
from llama_adapter.app.tasks.answers import Answer, AnswerError
from llama_adapter.app.tasks.prompts import EncodedPrompt
from llama_adapter.app.tasks.task import FREE_TEXT, Task
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.tokenizer import IncrementalDetokenizer


class ActiveRequest:
    """One question, and as much of its answer as is known. `CaptionLoop` takes it through encoder and engine."""

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
    ) -> None:
        """`started`: `time.perf_counter()` at the start of its times, None for now; `ms`: times known so far."""
        self.index, self.picture, self.digest = index, picture, digest
        self.prompt, self.task, self.tag = prompt, task, tag
        if not sampling.greedy and sampling.seed is None:
            # After an out-of-memory restart, the answer must go on as it would have.
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        self.sampling = sampling
        self.started = time.perf_counter() if started is None else started
        self.ms: dict[str, float] = {} if ms is None else ms
        self.is_reused = False  # the encoded picture came from the cache
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.stop = StopStrings(stop)
        # Set by `CaptionLoop.submit`:
        self.detokenizer: IncrementalDetokenizer | None = None
        self.prefix: Prefix | None = None
        self.unfamiliar: bool | None = None

    def elapsed_ms(self) -> float:
        """Milliseconds since it started."""
        return (time.perf_counter() - self.started) * 1e3

    def answered(self, finish: str, *, logprobs: tuple[float, ...] = ()) -> Answer:
        """The complete answer, at the engine's `stop`, `length` or `scored`."""
        answer = self._answer(finish="length" if finish == "length" else "stop")
        return self.task.complete(answer, prompt=self.prompt, logprobs=logprobs)

    def failed(self, error: AnswerError, *, keep_text: bool = False) -> Answer:
        """The answer of a failure; `keep_text` keeps the text so far and its times."""
        answer = self._answer(finish="error", error=error)
        if keep_text:
            return answer
        return dataclasses.replace(answer, text="", token_ids=(), ms={"total": answer.ms["total"]})

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
        )
