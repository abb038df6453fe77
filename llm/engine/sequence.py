"""What is asked of the engine, what it answers, and the state of one request in between."""

import random
from dataclasses import dataclass, field
from typing import Literal

from llama_adapter.llm.engine.sampler import Draw
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.adapter import Prefix

Finish = Literal["stop", "length", "choice", "not_finite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt about one picture.

    With `choices` (token ids of each answer) nothing is generated: the choices are weighed against each other. With
    `known_ids`, how the answer of an earlier attempt began, it goes on from there: they are not given again, count as
    new tokens, and have used up what was drawn for them, so that equal seeds go on to draw as they did.
    """

    id: int
    prompt_ids: tuple[int, ...]
    prefix: Prefix  # (A, 1, N, Q, H), from `Engine.project_prefix`
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choices: tuple[tuple[int, ...], ...] = ()
    known_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """News of one request: a token, or its end, or both. The end-of-sequence token itself is not passed on."""

    request_id: int
    token_id: int | None = None
    finish: Finish | None = None  # "not_finite": the model's numbers overflowed, there is no answer
    choice_logprobs: tuple[float, ...] = ()  # with finish "choice": one per choice, not normalised


class Sequence:
    """A running request. Its newest token has not been fed to the model yet.

    Tokens are counted when their step is handed to the device, and come into `token_ids` when they are read.
    """

    def __init__(self, request: Request, *, max_new_tokens: int) -> None:
        self.request = request
        self.prompt_ids = request.prompt_ids + request.known_ids  # what is fed first
        self.max_new_tokens = max_new_tokens  # what the request and the context leave beyond these
        self.token_ids: list[int] = []
        self.has_ended = False  # what a step still says of it is dropped
        self._num_steps = 0  # that choose a token of it
        self._random = random.Random(request.sampling.seed)
        for _ in request.known_ids:
            self._uniform()

    @property
    def num_prefill_tokens(self) -> int:
        """Length of the row that its first forward pass computes: the prompt, and behind it what is scored."""
        return len(self.prompt_ids) + sum(len(choice) - 1 for choice in self.request.choices)

    @property
    def is_complete(self) -> bool:
        """Whether its last token is chosen, read or not."""
        return self._num_steps >= self.max_new_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Positions of its slot in use: the prompt and every chosen token but the newest."""
        return len(self.prompt_ids) + max(min(self._num_steps, self.max_new_tokens) - 1, 0)

    @property
    def next_position(self) -> int:
        """Where its newest token goes. A complete sequence stays where it is, within the context."""
        return self.num_cached_tokens - (1 if self.is_complete else 0)

    @property
    def last_fed_position(self) -> int:
        """Where its last decode step wrote."""
        return self.num_cached_tokens - 1

    def next_draw(self) -> Draw:
        """The choice rule of its next token, which counts from now on; advances its randomness."""
        self._num_steps += 1
        return Draw(params=self.request.sampling, uniform=self._uniform())

    def _uniform(self) -> float:
        return 0.0 if self.request.sampling.greedy else self._random.random()
