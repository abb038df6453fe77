"""Shares of a decoder, computed by the kernels with callbacks for sums over ranks, give the whole decoder's logits.

The ranks are threads of this process.
"""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.runners.base import ScorePlan
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.llm.split import take_all
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.ranks import ALONE, Alone, CollectiveError
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.state import dequantise, quantise
from tests.bounds import difference
from tests.llm.test_native_runner import CONFIG
from tests.llm.toys import FAMILIES, NEEDS_KERNELS, rounding, toy_decoder, toy_prompts, toy_visual_queries

pytestmark = NEEDS_KERNELS

TIMEOUT_S = 120.0
# Heads of 128, as in LLaMA: shares begin at whole groups.
WIDE = dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, dim=512, ffn_dim=384)
# More ranks than heads of keys and values, and norms behind the sums over ranks.
GROUPED = dataclasses.replace(
    WIDE, num_kv_heads=1, norms="both", qk_norm="head", activation="gelu_tanh", score_cap=2.0, logit_cap=5.0
)
# Two or three ranks share 4 heads and 3 blocks of hidden units. With heads of 32, shares begin inside the 128 inputs
# whose activations share a scale.
CONFIGS = {"heads of 128": WIDE, "heads of 32": CONFIG, "grouped": GROUPED}
ODD = DecoderConfig(
    vocab_size=301,
    dim=60,
    num_layers=2,
    num_heads=6,
    ffn_dim=100,
    norm_eps=1e-6,
    num_adapter_layers=1,
    num_queries=3,
    separate_adapter_kv=True,
)
SEPARATE = dataclasses.replace(FAMILIES["grouped"], separate_adapter_kv=True)


class Meeting:
    """Lets the threads of all ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.tensors = [torch.empty(0)] * size


class ThreadRank(Alone):
    """A rank that is a thread; tensors are summed in the order of the ranks."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.tensors)
        self._meeting = meeting

    def _exchange(self, own: Tensor) -> list[Tensor]:
        self._meeting.tensors[self.rank] = own.clone()
        self._meeting.barrier.wait()
        tensors = list(self._meeting.tensors)
        self._meeting.barrier.wait()
        return tensors

    def sum(self, partial: Tensor) -> Tensor:
        total, *others = self._exchange(partial)
        total = total.clone()
        for other in others:
            total += other
        return total

    def join(self, part: Tensor, *, width: int) -> Tensor:
        return torch.cat(self._exchange(part), dim=-1)[..., :width]

    def from_first(self, values: Tensor) -> Tensor:
        return self._exchange(values)[0]


class BrokenRank(Alone):
    """Rank 0 of two ranks. Its second sum fails."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.num_sums = 0

    def sum(self, partial: Tensor) -> Tensor:
        self.num_sums += 1
        if self.num_sums == 2:
            raise CollectiveError("a rank ended")
        return partial


def stored(dtype: torch.dtype, precision: Precision, *, config: DecoderConfig = CONFIG) -> dict[str, Tensor]:
    decoder = toy_decoder(config)
    return dict(quantise(decoder.state_dict().items(), decoder, dtype=dtype, precision=precision))


def runner(
    state: dict[str, Tensor], ranks: Alone = ALONE, *, config: DecoderConfig = CONFIG, by_torch: bool = False
) -> Any:
    share = config.share(ranks.rank, ranks.size)
    dtype = state["embedding.weight"].dtype
    parts = take_all(state.items(), whole=config, share=share)
    engine = EngineConfig(decoder=share, dtype=dtype, operators="aten" if by_torch else "auto")
    made = place_decoder(engine, parts, backend=CpuBackend(), ranks=ranks).runner(4)
    if not by_torch and not isinstance(made, KernelRunner):
        pytest.skip(f"this processor has no kernels for {dtype}")
    return made


def logits(runner: Any) -> Tensor:
    """Logits of prompts, of steps after them, and scores of continuations."""
    queries_BQD = toy_visual_queries(4, config=runner.config.decoder)
    prompts, pictures = toy_prompts(4, longest=20), runner.project_prefix(queries_BQD)
    found = [torch.as_tensor(runner.prefill(prompts, pictures, first_slot=0).logits_RV)]
    for step in range(2):
        positions = [len(prompt) + step for prompt in prompts]
        found.append(torch.as_tensor(runner.decode([5, 6, 7, 8], positions).logits_RV).clone())
    scores = runner.score(ScorePlan(range(4), prompts, [((3, 4), (5,))] * 4, pictures))
    return torch.cat([part.flatten() for part in (*found, torch.tensor(scores))])


def of_all_ranks(state: dict[str, Tensor], size: int, **options: Any) -> list[Tensor]:
    meeting = Meeting(size)
    runners = [runner(state, ThreadRank(rank, meeting), **options) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(logits, runners))


@pytest.mark.parametrize(
    ("name", "dtype", "precision", "size"),
    [
        ("heads of 128", torch.float32, "float", 2),
        ("heads of 128", torch.float32, "float", 3),
        ("heads of 128", torch.bfloat16, "float", 3),
        ("heads of 128", torch.float32, "int8", 2),
        ("heads of 128", torch.float32, "int4", 3),
        ("heads of 32", torch.float32, "int4", 2),
        ("heads of 32", torch.float32, "int4", 3),
        ("grouped", torch.float32, "float", 3),
        ("grouped", torch.float32, "int8", 2),
        ("grouped", torch.float32, "int8", 3),
    ],
    ids=str,
)
def test_all_ranks_have_the_whole_decoders_logits(
    name: str, dtype: torch.dtype, precision: Precision, size: int
) -> None:
    config = CONFIGS[name]
    state = stored(dtype, precision, config=config)

    first, *others = of_all_ranks(state, size, config=config)

    assert all(torch.equal(first, other) for other in others)
    whole = logits(runner(state, config=config))
    if precision == "float":
        assert difference(first, whole) <= 2 * 2 * rounding(config, dtype=dtype)  # scores are of up to two tokens
        return
    # Sums in another order round some activations to another integer, in the last case all of them. So the results are
    # not further apart than twice the error that rounding activations makes at all.
    exact = logits(runner(dict(dequantise(state, dtype=dtype)), config=config))
    assert (first - whole).norm() <= 2 * (whole - exact).norm()


@pytest.mark.parametrize(
    ("config", "size"),
    [(ODD, 2), (ODD, 4), (SEPARATE, 2), (SEPARATE, 3), (FAMILIES["gemma"], 4), (FAMILIES["windows"], 4)],
    ids=["odd sizes-2", "odd sizes-4", "grouped-2", "grouped-3", "gemma-4", "windows-4"],
)
def test_ranks_in_torch_have_the_whole_decoders_logits(config: DecoderConfig, size: int) -> None:
    state = stored(torch.float32, "float", config=config)

    whole = logits(runner(state, config=config, by_torch=True))

    for found in of_all_ranks(state, size, config=config, by_torch=True):
        assert difference(found, whole) <= 2 * 2 * rounding(config)  # scores are of up to two tokens


@pytest.mark.parametrize(("config", "size"), [(WIDE, 2), (WIDE, 3), (dataclasses.replace(WIDE, ffn_dim=512), 2)])
def test_ranks_in_int4_round_activations_as_one_process_does(config: DecoderConfig, size: int) -> None:
    """Except for the few activations that another order of sums moves over a rounding boundary.

    They change the logits of their row. With other groups, every row would differ.
    """
    state = stored(torch.float32, "int4", config=config)

    first, *_ = of_all_ranks(state, size, config=config)

    differences = (first - logits(runner(state, config=config)))[: 12 * config.vocab_size].abs()
    is_near = differences.view(12, -1).amax(1) <= rounding(config)
    assert is_near.float().mean() >= 0.5


def test_a_sum_that_fails_ends_the_call_and_is_raised() -> None:
    ranks = BrokenRank()
    broken = runner(stored(torch.float32, "float"), ranks)

    with pytest.raises(CollectiveError, match="a rank ended"):
        logits(broken)

    assert ranks.num_sums == 2  # the sum of the embeddings, and one within the kernels
