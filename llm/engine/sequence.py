"""The state of one generating request between its steps."""

import random
from collections.abc import Collection
from dataclasses import replace

from llama_adapter.llm.engine.requests import Finish, GenerateRequest
from llama_adapter.llm.runners.draw import NO_TOKEN, Draw, Rules


class Sequence:
    """A request that is being answered. Its newest token has not been fed to the model yet.

    Tokens are counted when their step is planned, and are added to `token_ids` when they are read.
    """

    def __init__(
        self, request: GenerateRequest, *, row: int, max_new_tokens: int, first_row: int | None = None
    ) -> None:
        """`row` is a unique number. `max_new_tokens` is what request and context allow in addition to the known ids.

        `first_row` is the row in which the answer began, by default this one.
        """
        self.request = request
        self.id = request.id
        self.row = row
        self.first_row = row if first_row is None else first_row
        self.slot = -1  # -1 while it waits
        self.prompt_ids = request.prompt_ids + request.known_ids  # the tokens of its prefill
        self.max_new_tokens = max_new_tokens
        self.token_ids: list[int] = []
        self._num_steps = 0  # number of planned steps that choose a token of this sequence
        seed = request.sampling.seed
        # As a number, -1 would give the random numbers of 1.
        self._random = random.Random(seed if seed is None or seed >= 0 else str(seed))
        for _ in request.known_ids:
            self._uniform()

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of its row in its first forward pass."""
        return len(self.prompt_ids)

    @property
    def is_complete(self) -> bool:
        """Whether the step of its last token is planned."""
        return self._num_steps >= self.max_new_tokens

    @property
    def has_unread_step(self) -> bool:
        """Whether a step is planned whose token has not been read."""
        return self._num_steps > len(self.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Number of used positions of its slot: the prompt and all chosen tokens except the newest."""
        return len(self.prompt_ids) + max(min(self._num_steps, self.max_new_tokens) - 1, 0)

    @property
    def next_position(self) -> int:
        """The position at which its newest token is fed.

        A complete sequence repeats its last position, so that it stays within the context.
        """
        return self.num_cached_tokens - (1 if self.is_complete else 0)

    def begun_again(self, *, row: int) -> "Sequence":
        """The rest of its answer in another row. A token that has not been read is computed again."""
        known_ids = (*self.request.known_ids, *self.token_ids)
        max_new_tokens = self.max_new_tokens - len(self.token_ids)
        request = replace(self.request, known_ids=known_ids)
        return Sequence(request, row=row, max_new_tokens=max_new_tokens, first_row=self.first_row)

    def next_draw(self) -> Draw | None:
        """How its next token is drawn; None for greedy. Counts the token and advances the random numbers."""
        rules = self._rules()
        self._num_steps += 1
        sampling = self.request.sampling
        if not sampling.greedy:
            return Draw(sampling.temperature, sampling.top_p, sampling.top_k, self._uniform(), sampling.min_p, rules)
        return None if rules is None else Draw(1.0, 1.0, 1, 0.0, rules=rules)  # the best token under the rules

    def _rules(self) -> Rules | None:
        """What changes the logits of the next token; None if nothing does."""
        sampling = self.request.sampling
        rules = Rules(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        constraint = self.request.constraint
        if constraint is None and not rules.penalises:
            return None
        prompt, answer = self.request.prompt_ids, (*self.request.known_ids, *self.token_ids)
        return rules._replace(prompt=prompt, answer=answer, has_unread=self.has_unread_step, constraint=constraint)

    def take(self, token_id: int, *, end_ids: Collection[int]) -> Finish | None:
        """Append a token that was read. Returns why the sequence ends with it, or None if it continues."""
        if token_id == NO_TOKEN:
            return "not_finite"
        if self.request.constraint is not None and self.request.constraint.has_failed:
            return "too_complex"
        self.token_ids.append(token_id)
        if token_id in end_ids or token_id in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.max_new_tokens else None

    def _uniform(self) -> float:
        return 0.0 if self.request.sampling.greedy else self._random.random()
