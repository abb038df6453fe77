"""The interface between the engine and a runner: plans and results. They are plain values, except for prefixes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.prefix import PictureTokens, Prefix
from llama_adapter.llm.runners.draw import Draw

TokenIds = tuple[int, ...]
Pictures = Sequence[PictureTokens]  # of one prompt


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The first tokens of a prompt, whose keys and values are kept under a number for other prompts."""

    number: int
    num_tokens: int  # fewer than those of the prompt
    is_known: bool  # otherwise they are computed, and kept from then on


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Compute the log-probabilities of each prompt's continuations. Uses no slot.

    `rows` are numbers that are returned with the results. Every continuation has at least one token. `kept` and
    `dropped` are as in `PrefillPlan`; if a prompt has kept tokens that are known, all prompts have the same.
    """

    rows: Sequence[int]
    prompts: Sequence[TokenIds]
    continuations: Sequence[Sequence[TokenIds]]
    prefixes: Sequence[Prefix]
    pictures: Sequence[Pictures] = ()  # of each prompt; empty if no prompt has any
    kept: Sequence[KeptTokens | None] = ()
    dropped: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Fill slots from `first_slot` on with prompts and pictures, and choose each row's first token."""

    rows: Sequence[int]
    prompts: Sequence[TokenIds]
    prefixes: Sequence[Prefix]
    draws: Sequence[Draw | None]  # None is greedy
    first_slot: int
    num_logprobs: int | None = None  # of each token, and of so many of the likeliest ones; None: none
    pictures: Sequence[Pictures] = ()  # of each prompt; empty if no prompt has any
    kept: Sequence[KeptTokens | None] = ()  # of each prompt; a runner may leave it unused
    dropped: Sequence[int] = ()  # numbers of kept tokens that are released afterwards


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Feed the newest token of each of slots 0..R-1 at its position, and choose the next token.

    Without rows, nothing is computed, and the tokens that have not been read are read.
    """

    rows: Sequence[int]
    positions: Sequence[int]
    draws: Sequence[Draw | None]
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A decode step of all running rows and a prefill of the following slots, in one program."""

    decode: DecodePlan
    prefill: PrefillPlan

    @property
    def rows(self) -> Sequence[int]:
        """Rows of slots 0..R-1."""
        return [*self.decode.rows, *self.prefill.rows]

    @property
    def draws(self) -> Sequence[Draw | None]:
        """Draws of these rows."""
        return [*self.decode.draws, *self.prefill.draws]

    @property
    def num_logprobs(self) -> int | None:
        """The larger number of the two plans."""
        return most_logprobs((self.decode.num_logprobs, self.prefill.num_logprobs))


def most_logprobs(counts: Iterable[int | None]) -> int | None:
    """The largest `num_logprobs`; None if none is a number."""
    return max((count for count in counts if count is not None), default=None)


Plan = ScorePlan | PrefillPlan | DecodePlan | MixedPlan


def to_compute(
    prompts: Sequence[Sequence[int]], pictures: Sequence[Pictures], known: Sequence[int]
) -> list[tuple[Sequence[int], Pictures]]:
    """What is to be computed of each prompt: the tokens after the first `known` ones, and their pictures.

    If a prompt has known tokens, all its pictures are among them; see `KeptPrompts`. `pictures` may be empty.
    """
    each = zip(prompts, pictures or [()] * len(prompts), known, strict=True)
    return [(prompt[count:], () if count else own) for prompt, own, count in each]


class Scores(NamedTuple):
    """Log-probability of each continuation of each row."""

    rows: Sequence[int]
    logprobs: Sequence[Sequence[float]]


Top = Sequence[tuple[int, float]]  # the likeliest tokens and their log-probabilities, the likeliest first


class Tokens(NamedTuple):
    """The next token of each row; NO_TOKEN for a row whose logits are not finite."""

    rows: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()  # of each token, before temperature, top-k and top-p; empty without `num_logprobs`
    top: Sequence[Top] = ()  # of each row, `num_logprobs` tokens; empty without


Result = Scores | Tokens


class WarmUp(NamedTuple):
    """Cost of a warm-up."""

    seconds: float
    programs: int  # shapes of prefills and decode steps that ran


class Runner(Protocol):
    """The operations that the engine needs on a device. Rows in use are always slots 0..n-1."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def operators_name(self) -> str:
        """Name of the operators that the decoder uses, for people."""

    @property
    def runs_mixed(self) -> bool:
        """Whether the runner accepts mixed plans. Otherwise it gets prefills and decode steps in turn."""

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        """Visual query (B, Q, D) from the vision backend -> one prefix (A, 1, N, Q, H) per picture."""

    def empty_prefix(self) -> Prefix:
        """The prefix of a request without a picture. Its values are zero, so adapter attention adds exactly zero."""

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        """Keys and gated values of one picture, float32 (A, N, Q, H) each -> its prefix (A, 1, N, Q, H)."""

    def run(self, plan: Plan) -> Result:
        """Start a plan on the device; returns its result or, on a device with a queue, the previous step's tokens."""

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """Copy the prefix and the first `num_tokens` positions of slot `source` over slot `target`."""

    def clear(self, slot: int, *, position: int | None = None) -> None:
        """Set a slot, or one position of it, to zero. A NaN in it would affect the next row in spite of the mask."""

    def reset(self) -> None:
        """Clear all slots and drop tokens that have not been read."""

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        """Run the steps that prompts and answers of up to these lengths may need, and wait for the device.

        If decode steps have few shapes, all shapes are run, otherwise the largest. For each number of rows, one prefill
        of equal prompts of this length is run. No slot may be in use.
        """
