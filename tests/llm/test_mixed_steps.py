"""A decode step computed in the program of a prefill gives bitwise the same results as two separate programs."""

from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import Output
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, PrefillPlan
from llama_adapter.llm.runners.kernels import KernelRunner
from tests.llm.test_native_runner import CONFIG, CONFIGS, DTYPES, open_native, prefixes, runners
from tests.llm.toys import NEEDS_KERNELS, answer, answers, drain, resume, toy_decoder, toy_prompts, toy_requests

pytestmark = NEEDS_KERNELS


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("are_equal", [True, False], ids=["equal prompts", "different prompts"])
def test_a_mixed_step_gives_the_logits_of_its_parts(
    are_equal: bool, dtype: torch.dtype, config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = runners(config, dtype=dtype)
    prompts, pictures = toy_prompts(6, longest=20), prefixes(ours, 6)
    running, admitted = prompts[:3], [prompts[3]] * 3 if are_equal else prompts[3:]
    first = PrefillPlan(range(3), running, pictures[:3], [None] * 3, first_slot=0)
    step = DecodePlan(range(3), [len(prompt) for prompt in running], [None] * 3)
    prefill = PrefillPlan(range(3, 6), admitted, pictures[3:], [None] * 3, first_slot=3)
    positions = [len(prompt) + 1 for prompt in running] + [len(prompt) for prompt in admitted]

    newest: Any = ours.run(first)
    expected = [
        ours.decode(newest.token_ids, step.positions).logits_RV.copy(),
        ours.prefill(admitted, pictures[3:], first_slot=3).logits_RV,
        ours.decode([5] * 6, positions).logits_RV.copy(),
    ]
    for most_tokens in (2048, 10):  # in one portion, and in several
        monkeypatch.setattr("llama_adapter.llm.runners.ragged.MAX_TOKENS", most_tokens)
        ours.reset()
        ours.run(first)
        given = [ours.predict(MixedPlan(step, prefill)).logits_RV, ours.decode([5] * 6, positions).logits_RV.copy()]
        assert np.array_equal(np.concatenate(given), np.concatenate(expected))


class Watched(KernelRunner):
    """Records the plans that it runs, and fails in one mixed plan after computing it."""

    plans: list[Any]
    fails_at: int | None

    def run(self, plan: Any) -> Any:
        self.plans.append(plan)
        result = super().run(plan)
        if self.fails_at is not None and sum(isinstance(one, MixedPlan) for one in self.plans) == self.fails_at:
            self.fails_at = None
            raise MemoryError
        return result


@pytest.mark.parametrize("fails_at", [None, 2])
def test_running_rows_go_on_while_new_ones_are_admitted(fails_at: int | None) -> None:
    runner: Any = open_native(CONFIG, toy_decoder(CONFIG).state_dict(), num_slots=3)
    sampling = [SamplingParams(max_new_tokens=3 + 2 * index, temperature=0.5, seed=index) for index in range(6)]
    expected = {}
    requests = toy_requests(Engine(runner, eos_id=-7), toy_prompts(6), sampling=sampling, config=CONFIG)
    for request in requests:
        expected |= answer(Engine(runner, eos_id=-7), [request])
    runner.__class__, runner.plans, runner.fails_at = Watched, [], fails_at
    engine = Engine(runner, eos_id=-7)
    for request in requests:
        engine.submit(request)

    outputs: list[Output] = []
    try:
        while engine.num_unfinished:
            outputs += engine.step()
    except MemoryError:
        engine.reset()
        engine.limit_rows(2)
        resume(engine, requests, outputs)
        outputs += drain(engine)

    assert answers(outputs) == expected
    mixed = [plan for plan in runner.plans if isinstance(plan, MixedPlan)]
    assert len(mixed) >= 3
    assert all(len(plan.decode.rows) == plan.prefill.first_slot > 0 for plan in mixed)
    assert sum(isinstance(plan, PrefillPlan) for plan in runner.plans) == (1 if fails_at is None else 2)
    assert max(len(plan.rows) for plan in runner.plans) == 3
