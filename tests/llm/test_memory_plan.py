"""The memory plan is checked before large allocations, and automatic rows leave some memory free."""

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.memory_plan import (
    MemoryPlan,
    check_memory,
    fitting_rows,
    least_cache,
    plan_memory,
    planner,
    widest_cache,
)
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.schemes import OperatorChoice, Precision
from llama_adapter.runtime.schemes.state import convert_precision, stored_forms
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.fakes.cuda_linear import LinearOps
from tests.llm.toys import CONFIG, NATIVE, toy_decoder, toy_past


def planned(num_rows: int) -> MemoryPlan:
    return MemoryPlan(weights=1000, slots=10 * num_rows, activations=num_rows)


@pytest.mark.parametrize(
    ("free", "most", "rows"),
    [
        (10_000, 64, 64),
        (10_000, 16, 16),
        (10_000, 23, 16),  # rounded down to a power of two
        (10_000, 1, 1),
        (1_400, 64, 16),  # 32 rows need 1,352, which is more than 90 % of the free memory
        (1_000, 64, 1),  # not even one row fits; the check reports this
        (None, 64, 8),
        (None, 4, 4),
    ],
)
def test_rows_that_leave_a_tenth_of_the_memory(free: int | None, most: int, rows: int) -> None:
    assert fitting_rows(planned, free=free, most=most, unknown=8) == rows


def test_plan_counts_all_bytes_and_must_fit_also_while_it_is_loaded() -> None:
    forms = stored_forms(toy_decoder(), dtype=torch.float32)
    config = EngineConfig(decoder=CONFIG, dtype=torch.float32, num_slots=2)
    plan = planner(config, forms, backend=CpuBackend(), reserved=1000)(2)

    assert plan.weights == 1000 + sum(form.num_bytes for form in forms.values())
    assert plan.slots == 2 * 2 * 4 * CONFIG.dim * (3 * CONFIG.context + 2 * CONFIG.num_queries)
    for free in (plan.total, None):
        check_memory(plan, config, free=free, device="cpu")
    with pytest.raises(DeviceError) as caught:
        check_memory(plan, config, free=plan.total - 1, device="cpu")
    assert "--batch-size" in caught.value.hint
    with pytest.raises(DeviceError) as caught:
        check_memory(plan, replace(config, num_slots=1), free=0, device="cpu")
    assert "--batch-size" not in caught.value.hint

    plan = MemoryPlan(weights=1000, slots=30, activations=20, loading=40)
    assert plan.total == 1050
    config = EngineConfig(decoder=CONFIG, dtype=torch.float32)
    with pytest.raises(DeviceError, match="to load them"):
        check_memory(replace(plan, loading=90), config, free=1080, device="cpu")


def test_a_placed_layer_is_released_before_the_next_one_comes() -> None:
    # Arrays are tracked because a weak reference to one ends with its memory, while tensors can share their storage.
    arrays = {key: tensor.numpy().copy() for key, tensor in toy_decoder().state_dict().items()}
    alive = {key: weakref.ref(array) for key, array in arrays.items()}
    layer = "layers.0.feed_forward.down.weight"
    seen: list[bool] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key in list(arrays):
            if key.startswith("layers.1"):
                seen.append(alive[layer]() is not None)
            yield key, torch.from_numpy(arrays.pop(key))

    placed = place_decoder(EngineConfig(decoder=CONFIG, dtype=torch.float32), tensors(), backend=CpuBackend())

    assert set(seen) == {False}
    assert placed.runner(2) is not None
    assert alive["head.weight"]() is None


@pytest.mark.parametrize("name", ["layers.1.attention.out.bias", "norm.weight"])
def test_tensors_that_are_missing_or_unknown_are_named(name: str) -> None:
    state = toy_decoder().state_dict()
    config = EngineConfig(decoder=CONFIG, dtype=torch.float32)
    missing = {key: tensor for key, tensor in state.items() if key != name}
    unknown = {**state, f"{name}_scale": state[name]}
    misshapen = {**state, name: state[name][1:]}
    for wrong in (missing, unknown, misshapen):
        with pytest.raises(RuntimeError, match=name.rpartition(".")[2]):
            place_decoder(config, wrong.items(), backend=CpuBackend())


class Only8(HostCuda):
    """A GPU that widens weights of 4 bits."""

    def computes_in(self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        return precision != "int4" and super().computes_in(precision, activations, wanted=wanted)


@pytest.mark.parametrize(("precision", "backend"), [("int8", HostCuda), ("int4", HostCuda), ("int4", Only8)])
def test_a_plan_counts_what_the_layers_of_a_gpu_hold(
    precision: Precision, backend: type[HostCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda().install(monkeypatch)
    LinearOps().install(monkeypatch)
    sizes = replace(NATIVE, vocab_size=304)  # sizes that the operators accept
    config = EngineConfig(decoder=sizes, dtype=torch.bfloat16, num_slots=1)
    plain = toy_decoder(sizes)
    state = convert_precision(plain.state_dict(), plain, dtype=torch.bfloat16, wanted=precision)
    forms = stored_forms(plain, dtype=torch.bfloat16, precision=precision)

    decoder = place_decoder(config, state.items(), backend=backend()).decoder

    held = sum(tensor.nbytes for tensor in decoder.state_dict().values())
    scales = [form.num_bytes for name, form in forms.items() if name.endswith("_scale") and len(form.shape) == 2]
    dropped = sum(scales) if backend is Only8 else 0  # with the widened weights; plans count them
    assert planner(config, forms, backend=backend())(1).weights == held + dropped


SIZES_7B = DecoderConfig(
    vocab_size=32000, dim=4096, num_layers=32, num_heads=32, ffn_dim=11008, norm_eps=1e-6, context=512
)
PLACE_7B = 2 * 32 * 4096 * 2


def test_slots_times_context_need_not_fit() -> None:
    """The cache of a 7B with 256 slots took 69 GB."""
    config = EngineConfig(decoder=SIZES_7B, dtype=torch.float16, num_slots=256)
    assert plan_memory(config, weights=0).slots == 256 * 512 * PLACE_7B > 68e9
    least = least_cache(config)
    plan = plan_memory(least, weights=0)
    assert (least.block, least.spare_blocks) == (128, 3)
    assert plan.slots == (256 + 3) * 128 * PLACE_7B < 18e9


@pytest.mark.parametrize(
    ("num_slots", "context", "past", "block", "spare_blocks"),
    [
        (1, 4096, 0, 0, 0),  # a single row has its whole context
        (8, 128, 0, 0, 0),
        (8, 64, 0, 0, 0),
        (8, 500, 0, 128, 3),
        (8, 4096, 0, 128, 7 * 7 + 31),  # a quarter of 32 blocks each, all of them for one
        (8, 4096, 300, 384, 7 * 2 + 10),
    ],
)
def test_the_least_cache_holds_a_quarter_of_each_row_and_all_of_one(
    num_slots: int, context: int, past: int, block: int, spare_blocks: int
) -> None:
    sizes = replace(CONFIG, context=context)
    config = least_cache(
        EngineConfig(decoder=sizes, dtype=torch.float32, num_slots=num_slots, past=toy_past(sizes, past))
    )
    assert (config.block, config.spare_blocks) == (block, spare_blocks)


@pytest.mark.parametrize("kept_places", [0, 512])
def test_the_cache_takes_what_leaves_a_tenth_of_the_memory(kept_places: int) -> None:
    config = EngineConfig(decoder=SIZES_7B, dtype=torch.float16, num_slots=64, kept_places=kept_places)
    least = least_cache(config)
    plan = plan_memory(least, weights=10**9)
    for more in (0, 1000, 5000, 10**6):
        free = int((plan.total + more * PLACE_7B) / 0.9) + 1
        widest = widest_cache(least, plan, free=free)
        took = plan_memory(widest, weights=10**9)
        assert plan.total <= took.total <= 0.9 * free
        assert widest.kept_places == kept_places + (min(more // 4, 15 * 512) if kept_places else 0)
        assert (widest.block == 0) == (more == 10**6)  # every row has its whole context
        if widest.block:
            assert 0.9 * free - took.total < 128 * PLACE_7B + 1
    assert widest_cache(least, plan, free=None).block == 0
