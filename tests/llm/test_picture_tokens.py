"""Pictures as tokens: embeddings in place of ids give what the ids of these embeddings give, and only their own.

Beginnings of prompts with pictures are kept for further questions.
"""

import contextlib
import dataclasses
import itertools
import json
import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, Request, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.exported.program import HostSlots
from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.llm.parallel.follower import follow
from llama_adapter.llm.parallel.leader import LeadingRunner
from llama_adapter.llm.prefix import PictureTokens
from llama_adapter.llm.runners.base import MixedPlan, Plan, PrefillPlan, Result, ScorePlan
from llama_adapter.llm.runners.beginnings import Beginnings
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.errors import LlamaAdapterError
from tests.llm.exported import EXPORTS, runner_of
from tests.llm.toys import (
    EOS_ID,
    FAMILIES,
    NATIVE,
    NEEDS_KERNELS,
    answer,
    answers,
    drain,
    resume,
    rounding,
    to_score,
    toy_decoder,
    toy_past,
)

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


# Kept beginnings of prompts: further questions about a picture compute their own tokens only, and answer the same

WITHOUT = {"num_adapter_layers": 0, "num_queries": 0}
OTHERS = {name: replace(config, **WITHOUT) for name, config in FAMILIES.items()}
ROOM = 40  # places: three pictures with the text before them
BLOCKS = {"block": 8, "spare_blocks": 9}


class Watched:
    """Sees the plans of a runner."""

    def __init__(self, runner: Any) -> None:
        self.num_computed = 0  # tokens of prompts
        self.most_kept = 0  # places
        self.newest: Plan | None = None
        self.kept: Any = runner._beginnings
        self._run = runner.run
        runner.run = self.run

    def run(self, plan: Plan) -> Result:
        self.newest = plan
        prefill = plan.prefill if isinstance(plan, MixedPlan) else plan
        if isinstance(prefill, PrefillPlan | ScorePlan):
            known = [one.num_tokens if one and one.is_known else 0 for one in prefill.kept] or [0] * len(prefill.rows)
            self.num_computed += sum(len(prompt) for prompt in prefill.prompts) - sum(known)
        result = self._run(plan)
        self.most_kept = max(self.most_kept, sum(k.shape[2] for k, _ in self.kept.values()))
        return result


def watched_engine(
    config: DecoderConfig = PLAIN, *, kind: str = "kernels", folder: Path | None = None, **options: Any
) -> tuple[Engine, Watched]:
    """An engine on a runner of this kind, see `runner_of`, and its plans."""
    runner = runner_of(kind, config, folder, num_slots=4, **options)
    return Engine(runner, eos_id=EOS_ID), Watched(runner)


def questions(
    engine: Engine, pictures: Sequence[int], *, config: DecoderConfig = PLAIN, length: int = 9
) -> list[GenerateRequest]:
    """A question of its own length about each of these pictures, all with equal ids around them; -1: no picture."""
    draw = random.Random(0)
    requests = []
    for number, picture in enumerate(pictures):
        own = torch.randn(length, config.dim, generator=torch.Generator().manual_seed(picture + 1))
        shown = (PictureTokens(start=2, embeddings_SD=own, digest=f"picture {picture}"),) if picture >= 0 else ()
        words = [draw.randrange(8, 300) for _ in range(draw.choice([1, 2, 5, 5, 20]))]
        sampling = SamplingParams(max_new_tokens=draw.choice([3, 6, 20]), temperature=number % 2, seed=number)
        ids = (1, 3, *[PLACEHOLDER] * length, 5, *words)
        common: dict[str, Any] = {"prefix": engine.empty_prefix(), "sampling": sampling}
        requests.append(GenerateRequest(id=number, prompt_ids=ids, pictures=shown, **common))
    return requests


# Places for what is kept, and the cache. The second and third try each once, which shapes of steps do not depend on.
ROOMS: list[tuple[int, dict[str, int]]] = [(ROOM, {}), (ROOM, BLOCKS), (10_000, {}), (10_000, BLOCKS)]


@pytest.mark.parametrize("kind", ["kernels", "exact", "bucketed", "stepped", "onnx"])
def test_answers_are_those_of_an_empty_store(kind: str, tmp_path: Path) -> None:
    draw = random.Random(1)
    pictures = [draw.choice([-1, 0, 0, 1, 2, 3, 4]) for _ in range(24)]
    plain, all_tokens = watched_engine(kind=kind, folder=tmp_path)
    expected = answer(plain, questions(plain, pictures))
    assert all_tokens.most_kept == 0
    # Shapes of steps depend on neither, so that those of plain torch try each once.
    for room, cache in ROOMS if kind in ("kernels", "onnx") else ROOMS[1:3]:
        engine, watched = watched_engine(kind=kind, folder=tmp_path, kept_places=room, **cache)
        assert answer(engine, questions(engine, pictures)) == expected
        assert watched.num_computed < all_tokens.num_computed
        assert 0 < watched.most_kept <= room


@pytest.mark.parametrize("kind", ["exact", "onnx"])
@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_what_is_kept_has_the_heads_and_windows_of_every_family(
    config: DecoderConfig, kind: str, tmp_path: Path
) -> None:
    pictures = [0, 1, 0, 1, 1, -1, 0]
    engines = [watched_engine(config, kind=kind, folder=tmp_path, kept_places=room, **BLOCKS)[0] for room in (0, ROOM)]
    plain, keeping = (answer(engine, questions(engine, pictures, config=config)) for engine in engines)
    assert keeping == plain


@pytest.mark.parametrize(
    ("kind", "config", "num_past"),
    [
        *((kind, PLAIN, num_past) for kind in ("kernels", "exact", "bucketed", "onnx") for num_past in (0, 4)),
        *((kind, config, 4) for kind in ("exact", "onnx") for config in OTHERS.values()),
    ],
)
def test_choices_are_scored_behind_what_is_kept(
    kind: str, config: DecoderConfig, num_past: int, tmp_path: Path
) -> None:
    pictures = [0, 1, 0, 0, -1, 1, 2, 3, 0, 1]
    scores, computed = [], []
    for room in (0, 2 * 15):
        past = toy_past(config, num_past)
        engine, watched = watched_engine(config, kind=kind, folder=tmp_path, kept_places=room, past=past)
        answered = questions(engine, pictures, config=config)
        requests: list[Request] = [to_score(request, ((3, 4), (5,), (6, 7, 8))) for request in answered]
        requests[3] = answered[3]  # one question is answered, and its picture is kept for the choices
        for request in requests:
            engine.submit(request)
        outputs = drain(engine)
        scores.append({output.request_id: output.logprobs for output in outputs if output.finish == "scored"})
        computed.append(watched.num_computed)
        assert watched.most_kept <= room
    assert scores[0].keys() == scores[1].keys()
    for number, expected in scores[0].items():
        assert scores[1][number] == pytest.approx(expected, abs=2 * 3 * rounding(config))  # of up to three tokens
    assert computed[1] <= computed[0] - 3 * 11


@pytest.mark.parametrize("kind", ["exact", "onnx"])
def test_choices_that_fill_several_rows_keep_the_beginning_of_their_own_question(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tuple((first, 4, 5, 6, 7, 8, 9) for first in range(10, 40))  # 180 tokens are fed
    scores, computed, num_rows = [], [], list[int]()
    own = HostSlots.fresh

    def fresh(slots: HostSlots, rows: int, *given: Any) -> list[np.ndarray]:
        num_rows.append(rows)
        return own(slots, rows, *given)

    monkeypatch.setattr(HostSlots, "fresh", fresh)
    for room in (0, 1000):
        engine, watched = watched_engine(kind=kind, folder=tmp_path, kept_places=room)
        for request in questions(engine, [0, 1, 1, 0]):
            engine.submit(to_score(request, many))
        scores.append({output.request_id: output.logprobs for output in drain(engine)})
        computed.append(watched.num_computed)
    assert max(num_rows, default=0) <= 4  # of all layers: no more than the slots
    assert computed[1] == computed[0] - 2 * 11
    for number, expected in scores[0].items():
        assert scores[1][number] == pytest.approx(expected, abs=2 * 7 * rounding(PLAIN))


def test_further_questions_compute_their_own_tokens_only_also_if_they_come_together() -> None:
    engine, watched = watched_engine(kept_places=ROOM)
    first, second, third, other = questions(engine, [0, 0, 0, 1])
    answer(engine, [first])
    assert watched.num_computed == len(first.prompt_ids)
    answer(engine, [second, third])
    assert watched.num_computed == sum(map(len, (first.prompt_ids, second.prompt_ids[11:], third.prompt_ids[11:])))
    before = watched.num_computed
    answer(engine, [other, replace(first, prompt_ids=(1, 4, *first.prompt_ids[2:]))])  # another picture, another text
    assert watched.num_computed == before + len(other.prompt_ids) + len(first.prompt_ids)

    engine, watched = watched_engine(kept_places=ROOM)
    requests = questions(engine, [0] * 4)
    answer(engine, requests)
    assert watched.num_computed == 11 + sum(len(request.prompt_ids) - 11 for request in requests)


@pytest.mark.parametrize("kind", ["kernels", "exact", "onnx"])
def test_a_prompt_that_fills_the_context_is_computed_beside_a_known_beginning(kind: str, tmp_path: Path) -> None:
    """Padded to the other prompt, the rest of the known one would end beyond the context."""
    plain, _ = watched_engine(kind=kind, folder=tmp_path)
    engine, watched = watched_engine(kind=kind, folder=tmp_path, kept_places=1000)
    first, second, other = questions(engine, [0, 0, 1], length=38)
    other = replace(other, prompt_ids=other.prompt_ids + (9,) * (PLAIN.context - 2 - len(other.prompt_ids)))
    expected = answer(plain, [first, second, other])
    assert answer(engine, [first]) | answer(engine, [second, other]) == expected
    assert watched.num_computed == len(first.prompt_ids) + len(second.prompt_ids) - 40 + len(other.prompt_ids)


def test_the_least_recently_used_leaves() -> None:
    engine, watched = watched_engine(kept_places=3 * 11)
    requests = questions(engine, [0, 1, 2, 0, 3, 0, 1])  # 3 takes the place of 1, not of 0
    for request in requests:
        answer(engine, [request])
    is_known = [False, False, False, True, False, True, False]
    expected = [len(one.prompt_ids) - 11 * known for one, known in zip(requests, is_known, strict=True)]
    assert watched.num_computed == sum(expected)
    assert watched.most_kept == 3 * 11


@pytest.mark.parametrize(
    ("config", "room"),
    [(PLAIN, 10), (PLAIN, 0), (NATIVE, ROOM)],
    ids=["too little room", "none", "an adapter's prefix, which is part of what is computed"],
)
def test_nothing_is_kept(config: DecoderConfig, room: int) -> None:
    engine, watched = watched_engine(config, kept_places=room)
    requests = questions(engine, [0, 0])
    answer(engine, requests)
    assert (watched.num_computed, watched.most_kept) == (sum(len(one.prompt_ids) for one in requests), 0)


@pytest.mark.parametrize("kind", ["kernels", "exact", "onnx"])
def test_a_reset_forgets_what_is_kept(kind: str, tmp_path: Path) -> None:
    engine, watched = watched_engine(kind=kind, folder=tmp_path, kept_places=ROOM)
    first, second = questions(engine, [0, 0])
    expected = answer(engine, [first]) | answer(engine, [second])
    engine.reset()
    assert not watched.kept
    before = watched.num_computed
    assert answer(engine, [first, second]) == expected
    assert watched.num_computed == before + len(first.prompt_ids) + len(second.prompt_ids) - 11


def fail_a_step(engine: Engine, *, has_kept: bool) -> None:
    """A step that keeps a beginning fails; with `has_kept`, after it has kept it."""
    own = Beginnings.keep

    def keep(*given: Any, **options: Any) -> None:
        if has_kept:
            own(*given, **options)
        raise MemoryError

    with patch.object(Beginnings, "keep", keep), pytest.raises(MemoryError):
        engine.step()


@pytest.mark.parametrize("has_kept", [False, True])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("kind", ["kernels", "exact", "onnx"])
def test_a_failed_step_keeps_nothing(kind: str, scored: bool, has_kept: bool, tmp_path: Path) -> None:
    engine, watched = watched_engine(kind=kind, folder=tmp_path, kept_places=11)
    other, first, second = questions(engine, [1, 0, 0])
    expected = answer(engine, [second])
    answer(engine, [other])
    engine.submit(to_score(first, ((3, 4),)) if scored else first)
    fail_a_step(engine, has_kept=has_kept)
    engine.cancel(first.id)
    assert answer(engine, [second]) == expected
    assert len(watched.kept) == 1  # what the failed step was to drop is dropped, and what it kept


@NEEDS_KERNELS
@pytest.mark.parametrize("has_kept", [False, True])
def test_a_failed_step_beside_a_running_row_keeps_nothing(has_kept: bool) -> None:
    engine, watched = watched_engine(kept_places=11)
    other, first, second = questions(engine, [1, 0, 0])
    other = replace(other, sampling=replace(other.sampling, max_new_tokens=9))
    expected = answer(engine, [other]) | answer(engine, [second])
    engine.submit(other)
    outputs = [*engine.step(), *engine.step()]
    engine.submit(first)
    fail_a_step(engine, has_kept=has_kept)
    assert isinstance(watched.newest, MixedPlan)
    for failed in (other, first):
        engine.cancel(failed.id)
    resume(engine, [other], outputs)  # the token of the failed step is lost
    engine.submit(second)
    assert answers([*outputs, *drain(engine)]) == expected
    assert len(watched.kept) == 1


def test_a_thousand_questions_of_several_threads_get_their_own_pictures_answers() -> None:
    draw = random.Random(2)
    pictures = [draw.choice([-1, *range(12)]) for _ in range(1000)]
    plain, _ = watched_engine()
    expected = answer(plain, questions(plain, pictures))
    engine, watched = watched_engine(kept_places=4 * 11, **BLOCKS)
    waiting: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
    requests = questions(engine, pictures)

    def client(number: int) -> None:
        for request in requests[number::8]:
            waiting.put(request)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    outputs: list[Output] = []
    num_submitted = 0
    while num_submitted < len(requests) or engine.num_unfinished:
        while engine.num_unfinished < 8 and num_submitted < len(requests):
            engine.submit(waiting.get())
            num_submitted += 1
        outputs += engine.step()
    for thread in threads:
        thread.join()

    assert answers(outputs) == expected
    assert 0 < watched.most_kept <= 4 * 11
