"""The runner of the first rank, which forwards every call of the engine to all ranks."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import (
    DecodePlan,
    MixedPlan,
    Plan,
    PrefillPlan,
    Result,
    Runner,
    ScorePlan,
    WarmUp,
)
from llama_adapter.runtime.devices.transfer import shared
from llama_adapter.runtime.errors import LlamaAdapterError

_Value = TypeVar("_Value")


class _Number:
    """The number under which other ranks keep their part of a prefix until the first rank no longer needs it."""

    def __init__(self, value: int, unused: list[int]) -> None:
        self.value, self._unused = value, unused

    def __del__(self) -> None:
        self._unused.append(self.value)  # possibly in another thread; appending to a list is atomic


class SplitPrefix(Prefix):
    """This rank's heads of a prefix, and the number under which other ranks keep theirs."""

    number: _Number

    def copy(self) -> Prefix:
        """See `Prefix`. The other ranks keep their part as long as the original or the copy exists here."""
        return _numbered([super().copy()], [self.number])[0]


class LeadingRunner:
    """A runner of this rank's share that makes the other ranks execute the same calls. Not thread-safe.

    The first rank chooses tokens, and a collective in each step sends them to the other ranks. After a failure, or
    an interrupt during a call, every call raises the same error: the ranks are no longer in step, and the group must
    be opened again.
    """

    def __init__(
        self,
        runner: Runner,
        channel: Channel,
        *,
        explain: Callable[[BaseException], LlamaAdapterError],
        watching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`explain` returns an error that says which rank failed, and why. Every call runs inside `watching()`."""
        self._runner, self._channel, self._explain, self._watching = runner, channel, explain, watching
        self._failure: LlamaAdapterError | None = None
        self._numbers = itertools.count()
        self._unused: list[int] = []

    @property
    def config(self) -> EngineConfig:
        return self._runner.config

    @property
    def operators_name(self) -> str:
        return f"{self._runner.operators_name}, {self.config.decoder.num_ranks} ranks"

    @property
    def runs_mixed(self) -> bool:
        return self._runner.runs_mixed

    @property
    def is_usable(self) -> bool:
        """Whether the other ranks are waiting for a command, because no call has failed."""
        return self._failure is None

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        query_BQD = shared(visual_query_BQD)
        numbers = [_Number(next(self._numbers), self._unused) for _ in query_BQD]
        command = {"do": "project", "shape": list(query_BQD.shape), "numbers": [number.value for number in numbers]}
        prefixes = self._together(
            command, lambda: self._runner.project_prefix(visual_query_BQD), payload=(query_BQD.float().cpu(),)
        )
        return _numbered(prefixes, numbers)

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        parts = tuple(torch.from_numpy(np.ascontiguousarray(part, np.float32)) for part in (k_ANQH, v_ANQH))
        number = _Number(next(self._numbers), self._unused)
        command = {"do": "stored", "shape": list(parts[0].shape), "number": number.value}
        prefix = self._together(command, lambda: self._runner.stored_prefix(k_ANQH, v_ANQH), payload=parts)
        return _numbered([prefix], [number])[0]

    def empty_prefix(self) -> Prefix:
        number = _Number(next(self._numbers), self._unused)
        prefix = self._together({"do": "empty", "number": number.value}, self._runner.empty_prefix)
        return _numbered([prefix], [number])[0]

    def run(self, plan: Plan) -> Result:
        return self._together(_command(plan), lambda: self._runner.run(plan), payload=_embeddings(plan))

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._call("move", source=source, target=target, num_tokens=num_tokens)

    def clear(self, slot: int, *, position: int | None = None) -> None:
        self._call("clear", slot=slot, position=position)

    def reset(self) -> None:
        self._call("reset")

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        warm_up: WarmUp = self._call("warm_up", prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        return warm_up

    def _call(self, method: str, **arguments: int | None) -> Any:
        """Call a method, whose arguments are plain values, of every rank's runner."""
        command = {"do": method, "arguments": arguments}
        return self._together(command, lambda: getattr(self._runner, method)(**arguments))

    def _together(
        self, command: dict[str, Any], call: Callable[[], _Value], *, payload: Sequence[Tensor] = ()
    ) -> _Value:
        if self._failure is not None:
            raise self._failure
        unused: list[int] = []
        while self._unused:
            unused.append(self._unused.pop())
        try:
            with self._watching():
                self._channel.send({**command, "unused": unused})
                for values in payload:
                    self._channel.send_numbers(values)
                return call()
        except Exception as error:
            failure = self._failure = self._explain(error)
        except BaseException as error:
            self._failure = self._explain(error)
            raise
        raise failure  # outside of `except`: with a cause, the captioner might retry with fewer rows


def _numbered(prefixes: Sequence[Prefix], numbers: Sequence[_Number]) -> list[Prefix]:
    numbered: list[Prefix] = []
    for prefix, number in zip(prefixes, numbers, strict=True):
        split = SplitPrefix(*prefix)
        split.number = number
        numbered.append(split)
    return numbered


def _command(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, without draws and `num_logprobs`, because other ranks receive the chosen tokens."""
    match plan:
        case DecodePlan():
            return {"do": "decode", "positions": list(plan.positions)}
        case PrefillPlan():
            return {"do": "prefill", "first_slot": plan.first_slot, **_asked(plan)}
        case MixedPlan():
            return {"do": "mixed", "decode": _command(plan.decode), "prefill": _command(plan.prefill)}
        case ScorePlan():
            return {
                "do": "score",
                "continuations": [list(map(list, row)) for row in plan.continuations],
                **_asked(plan),
            }


def _asked(plan: PrefillPlan | ScorePlan) -> dict[str, Any]:
    """The prompts of a plan, and what belongs to them. The embeddings of pictures follow the command."""
    return {
        "prompts": list(map(list, plan.prompts)),
        "prefixes": _numbers(plan.prefixes),
        "pictures": [[(one.start, one.digest, list(one.embeddings_SD.shape)) for one in own] for own in plan.pictures],
        "kept": [tokens and dataclasses.astuple(tokens) for tokens in plan.kept],
        "dropped": list(plan.dropped),
    }


def _embeddings(plan: Plan) -> list[Tensor]:
    """The embeddings of a plan's pictures, which follow its command."""
    if isinstance(plan, MixedPlan):
        return _embeddings(plan.prefill)
    if isinstance(plan, DecodePlan):
        return []
    return [shared(picture.embeddings_SD).float().cpu() for own in plan.pictures for picture in own]


def _numbers(prefixes: Sequence[Prefix]) -> list[int]:
    for prefix in prefixes:
        assert isinstance(prefix, SplitPrefix), "it was made by another runner"
    return [prefix.number.value for prefix in prefixes]  # type: ignore[attr-defined]
