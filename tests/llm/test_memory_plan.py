"""The memory plan is checked before anything large is allocated, and automatic rows leave some memory free."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.load import place_decoder, planner
from llama_adapter.llm.memory_plan import MemoryPlan, check_memory, fitting_rows
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.errors import DeviceError
from tests.llm.toys import CONFIG, toy_decoder


def planned(num_rows: int) -> MemoryPlan:
    return MemoryPlan(weights=1000, slots=10 * num_rows, activations=num_rows)


@pytest.mark.parametrize(
    ("free", "most", "rows"),
    [
        (10_000, 64, 64),
        (10_000, 16, 16),
        (10_000, 23, 16),  # a power of two
        (10_000, 1, 1),
        (1_400, 64, 16),  # 32 rows need 1,352, more than nine tenths of the free memory
        (1_000, 64, 1),  # even one is too many; the check reports it
        (None, 64, 8),
        (None, 4, 4),
    ],
)
def test_rows_that_leave_a_tenth_of_the_memory(free: int | None, most: int, rows: int) -> None:
    assert fitting_rows(planned, free=free, most=most, unknown=8) == rows


def test_plan_counts_all_bytes_and_must_fit(tmp_path: Path) -> None:
    save_file(toy_decoder().state_dict(), tmp_path / "toy.safetensors")
    state = load_file(tmp_path / "toy.safetensors")  # mapped
    config = EngineConfig(decoder=CONFIG, dtype=torch.float32, num_slots=2)
    plan = planner(config, state, backend=CpuBackend(), reserved=1000)(2)

    assert plan.weights == 1000 + sum(tensor.nbytes for tensor in state.values())
    assert plan.slots == 2 * 2 * 4 * CONFIG.dim * (3 * CONFIG.context + 2 * CONFIG.num_queries)
    for free in (plan.total, None):
        check_memory(plan, config, free=free, device="cpu")
    with pytest.raises(DeviceError) as caught:
        check_memory(plan, config, free=plan.total - 1, device="cpu")
    assert "--batch-size" in caught.value.hint
    with pytest.raises(DeviceError) as caught:
        check_memory(plan, replace(config, num_slots=1), free=0, device="cpu")
    assert "--batch-size" not in caught.value.hint


def test_weights_in_memory_are_not_counted_again_because_placing_releases_them() -> None:
    # An array knows when its memory is released; a tensor can share its storage with others.
    arrays = {key: tensor.numpy().copy() for key, tensor in toy_decoder().state_dict().items()}
    state = {key: torch.from_numpy(array) for key, array in arrays.items()}
    config = EngineConfig(decoder=CONFIG, dtype=torch.float32, num_slots=2)
    plain = weakref.ref(arrays.pop("head.weight"))

    assert planner(config, state, backend=CpuBackend(), reserved=1000)(2).weights == 1000
    placed = place_decoder(config, state, backend=CpuBackend())

    assert not state
    assert placed.runner(2) is not None
    assert plain() is None
