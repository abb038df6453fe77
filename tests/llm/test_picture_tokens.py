"""Pictures as tokens: embeddings in place of ids give what the ids of these embeddings give, and only their own."""

import contextlib
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Request, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.llm.parallel.follower import follow
from llama_adapter.llm.parallel.leader import LeadingRunner
from llama_adapter.llm.prefix import PictureTokens
from llama_adapter.llm.runners.base import PrefillPlan, ScorePlan
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.errors import LlamaAdapterError
from tests.llm.exported import EXPORTS, runner_of
from tests.llm.toys import EOS_ID, NATIVE, NEEDS_KERNELS, answer, drain, toy_decoder

PLAIN = dataclasses.replace(NATIVE, num_adapter_layers=0, num_queries=0)
PLACEHOLDER = 7
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)

Words = tuple[int, ...]


def open_engine(kind: str, folder: Path | None = None) -> tuple[Engine, Tensor]:
    """An engine on a runner of this kind, and the embeddings of its tokens."""
    runner = runner_of(kind, PLAIN, folder, num_slots=4)
    assert isinstance(runner, KernelRunner) == (kind == "kernels")
    return Engine(runner, eos_id=EOS_ID), toy_decoder(PLAIN).state_dict()["embedding.weight"]


def asked(
    parts: Sequence[Words | tuple[str, Words]], embedding_VD: Tensor, engine: Engine, *, number: int, scored: bool
) -> tuple[Request, Request]:
    """A request with pictures, `("picture", ids)`, and one with the ids whose embeddings the pictures have."""
    ids: list[int] = []
    words: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part[0], str):
            shown = part[1]
            assert isinstance(shown, tuple)
            embeddings = embedding_VD[list(shown)]
            pictures.append(PictureTokens(start=len(ids), embeddings_SD=embeddings, digest=str(shown)))
            ids += [PLACEHOLDER] * len(shown)
            words += shown
        else:
            ids += part  # type: ignore[arg-type]
            words += part  # type: ignore[arg-type]
    common: dict[str, Any] = {"id": number, "prefix": engine.empty_prefix()}
    texts = (tuple(ids), tuple(pictures)), (tuple(words), ())
    if scored:
        found = [ScoreRequest(prompt_ids=a, pictures=b, continuations=((3, 4), (5,)), **common) for a, b in texts]
    else:
        found = [GenerateRequest(prompt_ids=a, pictures=b, sampling=GREEDY, **common) for a, b in texts]
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["exact", pytest.param("kernels", marks=NEEDS_KERNELS), *EXPORTS])
@pytest.mark.parametrize("scored", [False, True], ids=["generated", "scored"])
def test_pictures_give_what_the_ids_of_their_embeddings_give(kind: str, scored: bool, tmp_path: Path) -> None:
    check_pictures(*open_engine(kind, tmp_path), scored=scored)


def check_pictures(engine: Engine, embedding: Tensor, *, scored: bool, limit: float = 1e-5) -> None:
    """Prompts with pictures, in batches, give what the ids of the pictures' embeddings give, within `limit`."""
    draw = random.Random(0)

    def shown(count: int = 5) -> tuple[str, Words]:
        return "picture", tuple(draw.randrange(20, 300) for _ in range(count))

    same = shown()
    prompts = [
        *([(1, 3), shown(), (4, 5)] for _ in range(4)),  # equal ids and different pictures, in one batch
        [(1, 3), same, (4, 5)],
        [(1, 3), same, (4, 5)],
        [(1,), shown(9), (6,), shown(2), shown(3), (8, 9, 10)],
        [(1, 3, PLACEHOLDER, 5)],
        [shown(1), (4,)],
    ]
    pairs = [asked(parts, embedding, engine, number=n, scored=scored) for n, parts in enumerate(prompts)]

    found, wanted = ([pair[side] for pair in pairs] for side in (0, 1))

    if scored:
        for requests in (found, wanted):
            for request in requests:
                engine.submit(request)
        logprobs: dict[int, list[Tensor]] = {}
        for output in drain(engine):
            logprobs.setdefault(output.request_id, []).append(torch.tensor(output.logprobs))
        assert all(torch.allclose(ours, theirs, atol=limit) for ours, theirs in logprobs.values())
        assert len({tuple(ours.tolist()) for ours, _ in logprobs.values()}) == len(prompts) - 1  # two are the same
    else:
        assert answer(engine, found) == answer(engine, wanted)


@pytest.mark.parametrize("starts", [(3, 4), (4, 1), (0, 7)], ids=["overlapping", "unordered", "beyond the prompt"])
def test_pictures_outside_their_places_are_refused(starts: tuple[int, int]) -> None:
    engine, embedding = open_engine("exact")
    pictures = tuple(PictureTokens(start=start, embeddings_SD=embedding[:2], digest="") for start in starts)
    request = GenerateRequest(id=0, prompt_ids=(1,) * 8, prefix=engine.empty_prefix(), pictures=pictures)
    with pytest.raises(PromptError, match="A picture's tokens are at"):
        engine.submit(request)


class Wire(Channel):
    """Both ends of a channel: what is sent is received."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, command: dict[str, Any]) -> None:
        self.sent.append(json.loads(json.dumps(command)))

    def receive(self) -> dict[str, Any]:
        command: dict[str, Any] = self.sent.pop(0)
        return command

    def send_numbers(self, values: Tensor) -> None:
        self.sent.append(values)

    def receive_numbers(self, shape: list[int]) -> Tensor:
        values: Tensor = self.sent.pop(0)
        return values.view(shape)


def leading(runner: Any, wire: Wire) -> LeadingRunner:
    return LeadingRunner(
        runner, wire, explain=lambda error: LlamaAdapterError(str(error)), watching=contextlib.nullcontext
    )


def test_other_ranks_get_the_embeddings_of_each_prompt() -> None:
    engine, embedding = open_engine("exact")
    own = engine._runner
    wire, plans = Wire(), list[Any]()
    leader = leading(own, wire)
    prefix = leader.empty_prefix()
    one, two = (PictureTokens(start=n, embeddings_SD=embedding[n : n + 2], digest=str(n)) for n in (1, 5))
    prompts = [(1, *[PLACEHOLDER] * 8), (1, 2), (1, *[PLACEHOLDER] * 4)]
    pictures = [(one, two), (), (one,)]
    draws = [None] * 3
    leader.run(PrefillPlan(range(3), prompts, [prefix] * 3, draws, first_slot=0, pictures=pictures))
    leader.run(ScorePlan(range(3), prompts, [((3, 4),)] * 3, [prefix] * 3, pictures=pictures))
    wire.sent.append({"do": "stop"})

    class Follower:
        empty_prefix = own.empty_prefix

        def run(self, plan: Any) -> None:
            plans.append(plan)

    follow(Follower(), wire)  # type: ignore[arg-type]
    assert len(plans) == 2
    for plan in plans:
        assert [tuple(shown) for shown in plan.pictures] == pictures  # places and digests
        for shown, given in zip(itertools.chain(*plan.pictures), (one, two, one), strict=True):
            assert torch.equal(shown.embeddings_SD, given.embeddings_SD)


def test_an_error_of_the_first_rank_is_explained_and_later_calls_raise_it_again() -> None:
    """It has no cause, with which the captioner might retry."""

    class Failing:
        def reset(self) -> None:
            raise ZeroDivisionError("of the first rank")

    wire = Wire()
    leader = leading(Failing(), wire)
    caught = list[LlamaAdapterError]()
    for _ in range(2):
        with pytest.raises(LlamaAdapterError, match="of the first rank") as raised:
            leader.reset()
        caught.append(raised.value)
    first, second = caught
    assert first is second
    assert (first.__cause__, first.__context__) == (None, None)
    assert len(wire.sent) == 1, "the others got no second call"
    assert not leader.is_usable
