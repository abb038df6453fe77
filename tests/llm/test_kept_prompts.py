"""Kept beginnings of prompts: further questions about a picture compute their own tokens only, and answer the same."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Request
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.exported.program import HostSlots
from llama_adapter.llm.prefix import PictureTokens
from llama_adapter.llm.runners.base import MixedPlan, Plan, PrefillPlan, Result, ScorePlan
from llama_adapter.llm.runners.beginnings import Beginnings
from tests.llm.exported import runner_of
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
    toy_past,
)

WITHOUT = {"num_adapter_layers": 0, "num_queries": 0}
CONFIG = replace(NATIVE, **WITHOUT)
OTHERS = {name: replace(config, **WITHOUT) for name, config in FAMILIES.items()}
PLACEHOLDER = 7
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


def open_engine(
    config: DecoderConfig = CONFIG, *, kind: str = "kernels", folder: Path | None = None, **options: Any
) -> tuple[Engine, Watched]:
    """An engine on a runner of this kind, see `runner_of`, and its plans."""
    runner = runner_of(kind, config, folder, num_slots=4, **options)
    return Engine(runner, eos_id=EOS_ID), Watched(runner)


def questions(
    engine: Engine, pictures: Sequence[int], *, config: DecoderConfig = CONFIG, length: int = 9
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
    pictures = [draw.choice([-1, 0, 0, 1, 2, 3, 4]) for _ in range(40)]
    plain, all_tokens = open_engine(kind=kind, folder=tmp_path)
    expected = answer(plain, questions(plain, pictures))
    assert all_tokens.most_kept == 0
    # Shapes of steps depend on neither, so that those of plain torch try each once.
    for room, cache in ROOMS if kind in ("kernels", "onnx") else ROOMS[1:3]:
        engine, watched = open_engine(kind=kind, folder=tmp_path, kept_places=room, **cache)
        assert answer(engine, questions(engine, pictures)) == expected
        assert watched.num_computed < all_tokens.num_computed
        assert 0 < watched.most_kept <= room


@pytest.mark.parametrize("kind", ["exact", "onnx"])
@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_what_is_kept_has_the_heads_and_windows_of_every_family(
    config: DecoderConfig, kind: str, tmp_path: Path
) -> None:
    pictures = [0, 1, 0, 1, 1, -1, 0]
    engines = [open_engine(config, kind=kind, folder=tmp_path, kept_places=room, **BLOCKS)[0] for room in (0, ROOM)]
    plain, keeping = (answer(engine, questions(engine, pictures, config=config)) for engine in engines)
    assert keeping == plain


@pytest.mark.parametrize("num_past", [0, 4])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *((kind, CONFIG) for kind in ("kernels", "exact", "bucketed", "onnx")),
        *((kind, config) for kind in ("exact", "onnx") for config in OTHERS.values()),
    ],
)
def test_choices_are_scored_behind_what_is_kept(
    kind: str, config: DecoderConfig, num_past: int, tmp_path: Path
) -> None:
    pictures = [0, 1, 0, 0, -1, 1, 2, 3, 0, 1]
    scores, computed = [], []
    for room in (0, 2 * 15):
        past = toy_past(config, num_past)
        engine, watched = open_engine(config, kind=kind, folder=tmp_path, kept_places=room, past=past)
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
        engine, watched = open_engine(kind=kind, folder=tmp_path, kept_places=room)
        for request in questions(engine, [0, 1, 1, 0]):
            engine.submit(to_score(request, many))
        scores.append({output.request_id: output.logprobs for output in drain(engine)})
        computed.append(watched.num_computed)
    assert max(num_rows, default=0) <= 4  # of all layers: no more than the slots
    assert computed[1] == computed[0] - 2 * 11
    for number, expected in scores[0].items():
        assert scores[1][number] == pytest.approx(expected, abs=2 * 7 * rounding(CONFIG))


def test_further_questions_compute_their_own_tokens_only_also_if_they_come_together() -> None:
    engine, watched = open_engine(kept_places=ROOM)
    first, second, third, other = questions(engine, [0, 0, 0, 1])
    answer(engine, [first])
    assert watched.num_computed == len(first.prompt_ids)
    answer(engine, [second, third])
    assert watched.num_computed == sum(map(len, (first.prompt_ids, second.prompt_ids[11:], third.prompt_ids[11:])))
    before = watched.num_computed
    answer(engine, [other, replace(first, prompt_ids=(1, 4, *first.prompt_ids[2:]))])  # another picture, another text
    assert watched.num_computed == before + len(other.prompt_ids) + len(first.prompt_ids)

    engine, watched = open_engine(kept_places=ROOM)
    requests = questions(engine, [0] * 4)
    answer(engine, requests)
    assert watched.num_computed == 11 + sum(len(request.prompt_ids) - 11 for request in requests)


@pytest.mark.parametrize("kind", ["kernels", "exact", "onnx"])
def test_a_prompt_that_fills_the_context_is_computed_beside_a_known_beginning(kind: str, tmp_path: Path) -> None:
    """Padded to the other prompt, the rest of the known one would end beyond the context."""
    plain, _ = open_engine(kind=kind, folder=tmp_path)
    engine, watched = open_engine(kind=kind, folder=tmp_path, kept_places=1000)
    first, second, other = questions(engine, [0, 0, 1], length=38)
    other = replace(other, prompt_ids=other.prompt_ids + (9,) * (CONFIG.context - 2 - len(other.prompt_ids)))
    expected = answer(plain, [first, second, other])
    assert answer(engine, [first]) | answer(engine, [second, other]) == expected
    assert watched.num_computed == len(first.prompt_ids) + len(second.prompt_ids) - 40 + len(other.prompt_ids)


def test_the_least_recently_used_leaves() -> None:
    engine, watched = open_engine(kept_places=3 * 11)
    requests = questions(engine, [0, 1, 2, 0, 3, 0, 1])  # 3 takes the place of 1, not of 0
    for request in requests:
        answer(engine, [request])
    is_known = [False, False, False, True, False, True, False]
    expected = [len(one.prompt_ids) - 11 * known for one, known in zip(requests, is_known, strict=True)]
    assert watched.num_computed == sum(expected)
    assert watched.most_kept == 3 * 11


@pytest.mark.parametrize(
    ("config", "room"),
    [(CONFIG, 10), (CONFIG, 0), (NATIVE, ROOM)],
    ids=["too little room", "none", "an adapter's prefix, which is part of what is computed"],
)
def test_nothing_is_kept(config: DecoderConfig, room: int) -> None:
    engine, watched = open_engine(config, kept_places=room)
    requests = questions(engine, [0, 0])
    answer(engine, requests)
    assert (watched.num_computed, watched.most_kept) == (sum(len(one.prompt_ids) for one in requests), 0)


@pytest.mark.parametrize("kind", ["kernels", "exact", "onnx"])
def test_a_reset_forgets_what_is_kept(kind: str, tmp_path: Path) -> None:
    engine, watched = open_engine(kind=kind, folder=tmp_path, kept_places=ROOM)
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
    engine, watched = open_engine(kind=kind, folder=tmp_path, kept_places=11)
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
    engine, watched = open_engine(kept_places=11)
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
