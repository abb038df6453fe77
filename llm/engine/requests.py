"""The engine's requests and its output events."""

from dataclasses import dataclass, field
from typing import Literal

from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import PictureTokens, Prefix
from llama_adapter.llm.runners.draw import Constraint

# "scored" ends a ScoreRequest. There is no answer after "not_finite", which means that the model's numbers overflowed,
# and after "too_complex": its constraint has failed.
Finish = Literal["stop", "length", "scored", "not_finite", "too_complex"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """Continue a prompt about one picture.

    `known_ids` is the beginning of the answer from an earlier attempt. Generation resumes after it. These tokens are
    not output again, but they count as new tokens and consume random numbers, so that a seed gives the same answer.
    """

    id: int
    prompt_ids: tuple[int, ...]
    prefix: Prefix  # (A, 1, N, Q, H), from `Engine.project_prefix`
    pictures: tuple[PictureTokens, ...] = ()  # embeddings in place of tokens of the prompt, by place
    sampling: SamplingParams = field(default_factory=SamplingParams)
    known_ids: tuple[int, ...] = ()
    # Each output has the log-probabilities of its token and of so many of the likeliest ones; None: it has none.
    num_logprobs: int | None = None
    constraint: Constraint | None = None  # the form of this answer; not shared with other requests


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Compute the log-probability of each continuation of a prompt about one picture. Nothing is generated."""

    id: int
    prompt_ids: tuple[int, ...]
    prefix: Prefix
    continuations: tuple[tuple[int, ...], ...]  # token ids, at least one each
    pictures: tuple[PictureTokens, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of its row in the forward pass. The last token of each continuation is not fed."""
        return len(self.prompt_ids) + sum(len(continuation) - 1 for continuation in self.continuations)


Request = GenerateRequest | ScoreRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One event of a request: a token, its end, or both. The end-of-sequence token itself is not output."""

    request_id: int
    token_id: int | None = None
    finish: Finish | None = None
    # If finish is "scored": the log-probability of each continuation, not normalised by length. Otherwise that of the
    # token, if the request has `num_logprobs`.
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens instead of this one or with it, the likeliest first
