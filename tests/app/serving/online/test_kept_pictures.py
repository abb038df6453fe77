"""Questions through the service about several pictures, or one that is known: transformers' answers."""

import io
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.serving.online.service import Ask, Service, ServiceLimits
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.base import MixedPlan, PrefillPlan, ScorePlan
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.kernels.library import find_library
from tests.app.picture_models import Reference, pictures, save
from tests.app.serving.online.waiting import started

TOKENS = 12


def encoded(image: Any) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_pictures_that_are_kept_encoded_again_or_together_have_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = 0
    runner: Any = EagerRunner if find_library().library is None else KernelRunner
    run = runner.run

    def watched(self: Any, plan: Any) -> Any:
        nonlocal known
        prefill = plan.prefill if isinstance(plan, MixedPlan) else plan
        if isinstance(prefill, PrefillPlan | ScorePlan):
            known += sum(one.is_known for one in prefill.kept if one)
        return run(self, plan)

    monkeypatch.setattr(runner, "run", watched)
    folder = save(tmp_path, "smolvlm")
    reference, images = Reference(folder, "smolvlm"), pictures(3)
    files = [encoded(image) for image in images]
    cases = [
        (numbers, question)
        for numbers in ((0,), (1,), (), (0, 1), (2, 1), (1, 0), (2,), (0,))
        for question in ("What is it?", "Is it red or blue, and how many are there in all?")
    ]

    def load() -> Captioner:
        return Captioner.load(folder, batch_size=4, device="cpu", dtype="float32", context=400)

    def ask(numbers: tuple[int, ...], question: str, **options: Any) -> Ask:
        first, *others = (files[number] for number in numbers) if numbers else (None,)
        sampling = SamplingParams(max_new_tokens=TOKENS)
        return Ask(picture=first, others=tuple(filter(None, others)), prompt=question, sampling=sampling, **options)

    # A small cache of encoded pictures, so that some are encoded again.
    with started(Service(load, limits=ServiceLimits(encoded_bytes=20_000))) as service:
        found = [handle.result() for handle in [service.submit(ask(*case)) for case in cases]]
        first, second = (
            service.submit(ask((0,), "Which colour is it?", task=OneOf(("red", "blue")))).result() for _ in range(2)
        )

    for (numbers, question), answer in zip(cases, found, strict=True):
        expected = reference.answer([images[number] for number in numbers], question, max_new_tokens=TOKENS)
        assert (answer.error, list(answer.token_ids)) == (None, expected)
    assert {answer.is_reused for answer in found} == {True, False}
    assert known > len(cases) / 3
    assert first.choice is not None
    assert first.choice == pytest.approx(second.choice, abs=1e-4)
