"""Questions of several threads through the service, behind kept pictures: transformers' answers, in bounded memory."""

import io
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.models import memory_fit
from llama_adapter.app.serving.online.service import Ask, Service, ServiceLimits
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.base import MixedPlan, PrefillPlan, ScorePlan
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.kernels.library import find_library
from tests.app.picture_models import Reference, pictures, save
from tests.app.serving.online.waiting import started

QUESTIONS = ("What is it?", "Is it red or blue, and how many are there in all?", "a")
TOKENS, THREADS, ROUNDS = 12, 8, 3
ROOM = 400  # places: fewer than the six pictures need
CHOICES = ("red", "blue")


@pytest.mark.slow
def test_questions_of_several_threads_are_answered_behind_kept_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = memory_fit.widest_cache
    monkeypatch.setattr(
        memory_fit,
        "widest_cache",
        lambda config, plan, **_: plain(config, plan, free=plan.total),  # no more than least
    )
    known, kept = 0, 0
    runner: Any = EagerRunner if find_library().library is None else KernelRunner
    run = runner.run

    def watched(self: Any, plan: Any) -> Any:
        nonlocal known, kept
        prefill = plan.prefill if isinstance(plan, MixedPlan) else plan
        if isinstance(prefill, PrefillPlan | ScorePlan):
            known += sum(one.is_known for one in prefill.kept if one)
        result = run(self, plan)
        kept = max(kept, sum(k.shape[2] for k, _ in self._beginnings.values()))
        return result

    monkeypatch.setattr(runner, "run", watched)
    folder = save(tmp_path, "smolvlm")
    reference, images = Reference(folder, "smolvlm"), pictures(6)
    files = [encoded(image) for image in images]
    cases = [((number,), question) for number, question in itertools.product(range(6), QUESTIONS)]
    cases += [(numbers, QUESTIONS[0]) for numbers in ((), (0, 1), (1, 0))]
    expected = {
        (numbers, question): reference.answer([images[number] for number in numbers], question, max_new_tokens=TOKENS)
        for numbers, question in cases
    }

    def load() -> Captioner:
        return Captioner.load(folder, batch_size=4, device="cpu", dtype="float32", context=ROOM)

    def asked(service: Service, thread: int, found: list[tuple[tuple[tuple[int, ...], str], Answer]]) -> None:
        for numbers, question in cases[thread::3] * ROUNDS:
            first, *others = (files[number] for number in numbers) if numbers else (None,)
            sampling = SamplingParams(max_new_tokens=TOKENS)
            ask = Ask(
                picture=first,
                others=tuple(filter(None, others)),
                prompt=question,
                sampling=sampling,
                client=str(thread),
            )
            found.append(((numbers, question), service.submit(ask).result()))

    found: list[tuple[tuple[tuple[int, ...], str], Answer]] = []
    # A small cache of encoded pictures, so that some are encoded again.
    with started(Service(load, limits=ServiceLimits(max_waiting=1000, encoded_bytes=20_000))) as service:
        threads = [threading.Thread(target=asked, args=(service, n % 3, found)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        chosen = [service.submit(choice(file)).result() for file in files for _ in range(2)]

    assert len(found) == THREADS * ROUNDS * len(cases) // 3
    for case, answer in found:
        assert answer.error is None
        assert list(answer.token_ids) == expected[case]
    assert known > len(found) / 3
    assert {answer.is_reused for _, answer in found} == {True, False}
    assert 0 < kept <= ROOM
    for first, second in zip(chosen[::2], chosen[1::2], strict=True):
        assert scores(first) == pytest.approx(scores(second), abs=1e-4)


def encoded(image: Any) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def choice(file: bytes) -> Ask:
    return Ask(picture=file, prompt="Which colour is it?", task=OneOf(CHOICES))


def scores(answer: Answer) -> Sequence[float]:
    assert answer.choice is not None
    return [answer.choice[name] for name in CHOICES]
