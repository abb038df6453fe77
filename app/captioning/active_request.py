"""One prompt about one picture on its way to an answer: what was asked, and what is known of the answer so far."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from llama_adapter.app.captioning.stop_strings import StopTexts
from llama_adapter.app.tasks.answers import Answer, AnswerError
from llama_adapter.app.tasks.prompts import EncodedPrompt
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.tokenizer import IncrementalDetokenizer


class ActiveRequest:
    """Of one prompt and one picture. `app/loop.py` leads it through encoder and engine."""

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
        tag: Any = None,
    ) -> None:
        """`started`: the `time.perf_counter()` that its times count from, None is now; `ms`: those that are known."""
        self.index, self.picture, self.digest = index, picture, digest
        self.prompt, self.choices = prompt, choices
        if not sampling.greedy and sampling.seed is None:
            # Begun again, it has to go on as it would have.
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(63))
        self.sampling = sampling
        self.started = time.perf_counter() if started is None else started
        self.ms: dict[str, float] = {} if ms is None else ms
        self.is_reused, self.tag = is_reused, tag
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.stopping = StopTexts(stop)
        # From `CaptionLoop.submit` on:
        self.detokenizer: IncrementalDetokenizer | None = None
        self.prefix: Prefix | None = None
        self.unfamiliar: bool | None = None

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
            unfamiliar=self.unfamiliar,
            is_reused=self.is_reused,
            tag=self.tag,
        )
