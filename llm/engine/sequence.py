"""The state of one generating request between its steps."""

import random

from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampler import Draw


class Sequence:
    """A running request. Its newest token has not been fed to the model yet.

    Tokens are counted when their step is handed to the device, and come into `token_ids` when they are read.
    """

    def __init__(self, request: GenerateRequest, *, max_new_tokens: int) -> None:
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
