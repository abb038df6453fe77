"""If the kernels cannot allocate memory, torch's error is raised and nothing is computed."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import ScorePlan
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.devices.cpu_linear import NativeLinear, install_kernels, kernel_arrays
from llama_adapter.runtime.kernels import library as kernels
from llama_adapter.runtime.kernels.arrays import Blocks
from llama_adapter.runtime.kernels.compiling import compiled, compilers
from llama_adapter.runtime.kernels.instruction_sets import InstructionSet, choose_instructions
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.problems import is_out_of_memory
from llama_adapter.runtime.schemes import int8
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.vision.block import Block
from tests.llm import toys
from tests.llm.toys import NEEDS_KERNELS, open_runner, toy_decoder, toy_prompts, toy_visual_queries

CONFIG = dataclasses.replace(
    toys.CONFIG, head_dim=0, num_kv_heads=0, dim=128, num_layers=2, ffn_dim=192, num_adapter_layers=1
)
ROOT = Path(__file__).resolve().parents[3]

pytestmark = NEEDS_KERNELS


class Host:
    """A machine with `num_bytes` for scratch memory; None means unlimited."""

    def __init__(self) -> None:
        self.num_bytes: int | None = None
        self.asked: list[int] = []

    def allocated(self, num_bytes: int) -> kernels._Scratch:
        self.asked.append(num_bytes)
        # Request more than any machine has, so that numpy raises its own error.
        is_too_much = self.num_bytes is not None and num_bytes > self.num_bytes
        return _allocated(2**60 if is_too_much else num_bytes)


_allocated = kernels._allocated


@pytest.fixture(name="host")
def host_fixture(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(kernels, "_allocated", host.allocated)
    return host


@pytest.fixture(name="thread")
def thread_fixture() -> Iterator[Callable[..., object]]:
    """Runs a test's calls in one thread, which starts without scratch memory."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *arguments, **options: pool.submit(call, *arguments, **options).result()


@pytest.fixture(name="library")
def library_fixture() -> Library:
    library = find_library().library
    assert library is not None
    return library


def runner(dtype: torch.dtype = torch.float32) -> KernelRunner:
    state = {name: value.to(dtype) for name, value in toy_decoder(CONFIG).state_dict().items()}
    opened = open_runner(CONFIG, state, backend=CpuBackend(), num_slots=6)
    if not isinstance(opened, KernelRunner):
        pytest.skip(f"this processor has no kernels for {dtype}")
    return opened


def prefixes(runner: KernelRunner) -> list[Prefix]:
    return runner.project_prefix(toy_visual_queries(6, config=CONFIG))


def blocks(library: Library) -> tuple[Blocks, np.ndarray]:
    torch.manual_seed(0)
    module = nn.ModuleList(Block(64, num_heads=2, hidden_dim=256, activation="quick_gelu") for _ in range(2))
    install_kernels(module.requires_grad_(False), library=library)
    arrays = kernel_arrays(nn.ModuleDict({"blocks": module}))
    assert arrays is not None
    sizes = {"count": 2, "width": 64, "hidden_dim": 256, "num_heads": 2, "activation": "quick_gelu", "eps": 1e-5}
    stack = Blocks(arrays, "blocks", **sizes, dtype="float32", library=library)  # type: ignore[arg-type]
    return stack, torch.randn(3, 70, 64).numpy()


def works(runner: KernelRunner, library: Library) -> dict[str, Callable[[], Any]]:
    """One call of each kernel function that needs scratch memory."""
    prompts, pictures = toy_prompts(6), prefixes(runner)
    plan = ScorePlan(range(6), prompts, [((3, 4), (5,))] * 6, pictures)
    stack, x_BTW = blocks(library)
    linear = nn.Linear(48, 80).requires_grad_(False)
    store_parts(linear, int8.SCHEME.quantise(linear.weight))
    layer = NativeLinear(linear, library=library)
    x_RF = torch.randn(5, 48)
    return {
        "prefill": lambda: runner.prefill(prompts, pictures, first_slot=0).logits_RV,
        "decode": lambda: runner.decode([5] * 6, [len(prompt) for prompt in prompts]).logits_RV.copy(),
        "score": lambda: np.array(runner.score(plan)),
        "blocks": lambda: stack(x_BTW),
        "linear": lambda: layer(x_RF).numpy(),
    }


@pytest.mark.parametrize("name", ["prefill", "decode", "score", "blocks", "linear"])
def test_after_a_failed_allocation_the_next_call_computes_the_same(
    name: str, host: Host, thread: Callable[..., Any], library: Library
) -> None:
    every = works(runner(), library)
    thread(every["prefill"])  # the steps continue after this prefill
    work = every[name]
    thread(setattr, kernels._held, "scratch", kernels._NONE)
    host.num_bytes = 0

    with pytest.raises(MemoryError) as caught:
        thread(work)

    assert is_out_of_memory(caught.value)
    host.num_bytes = None
    after = thread(work)
    assert np.array_equal(after, work())  # in this thread, which never lacked memory
    assert thread(lambda: kernels._held.scratch.num_bytes) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_the_rows_need_half_the_scratch(dtype: torch.dtype, host: Host, thread: Callable[..., Any]) -> None:
    ours = runner(dtype)
    prompts, pictures = [tuple(range(3, 33))] * 6, prefixes(ours)
    host.num_bytes = 0
    for count in (6, 3):
        with pytest.raises(MemoryError):
            thread(ours.prefill, prompts[:count], pictures[:count], first_slot=0)

    assert host.asked[1] < 0.6 * host.asked[0]


def test_small_scratch_is_released_before_more_is_allocated(
    host: Host, thread: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = runner()
    prompts, pictures = toy_prompts(6), prefixes(ours)
    thread(ours.prefill, prompts[:1], pictures[:1], first_slot=0)
    held: list[int] = []

    def allocated(num_bytes: int) -> kernels._Scratch:
        held.append(kernels._held.scratch.num_bytes)
        return _allocated(num_bytes)

    monkeypatch.setattr(kernels, "_allocated", allocated)
    thread(ours.prefill, prompts, pictures, first_slot=0)

    assert held == [0]


def test_longer_steps_allocate_nothing_more(host: Host, thread: Callable[..., Any]) -> None:
    ours = runner()
    ours.prefill([[3, 4]] * 6, prefixes(ours), first_slot=0)  # in another thread, which has its own scratch memory
    host.asked.clear()

    for position in range(2, 20):
        thread(ours.decode, [5] * 6, [position] * 6)

    assert len(host.asked) == 1


def test_the_number_of_threads_does_not_change_the_result(library: Library) -> None:
    stack, x_BTW = blocks(library)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = stack(x_BTW)

    results = []
    try:
        # Jobs alternate between many and few threads: a late thread of one job must not compute in the next.
        for num_threads in (7, 2) * 25:
            torch.set_num_threads(num_threads)
            results.append(stack(x_BTW))
    finally:
        torch.set_num_threads(before)

    assert all(np.array_equal(result, expected) for result in results)


def test_the_library_allocates_nothing_and_never_ends_the_process() -> None:
    instructions = choose_instructions()
    assert isinstance(instructions, InstructionSet)
    names = set(compiled(next(compilers()), instructions).read_bytes().split(b"\0"))

    # A loaded library calls __tls_get_addr to find thread-local variables; without memory it ends the process.
    assert not names & {b"abort", b"exit", b"malloc", b"calloc", b"realloc", b"aligned_alloc", b"__tls_get_addr"}


CHILD = """
import dataclasses, os, resource, sys
import torch
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.problems import is_out_of_memory
from tests.llm.toys import CONFIG, open_runner, toy_decoder, toy_visual_queries

torch.set_num_threads(1)
sizes = {"dim": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 0, "head_dim": 0}
config = dataclasses.replace(CONFIG, **sizes, ffn_dim=65536, num_adapter_layers=1)
runner = open_runner(config, toy_decoder(config).state_dict(), backend=CpuBackend(), num_slots=32)
prefixes = runner.project_prefix(toy_visual_queries(32, config=config))
prompts = [[3] * 60] * 32
expected = runner.prefill(prompts[:1], prefixes[:1], first_slot=0).logits_RV
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGE_SIZE") + 460 * 2**20  # all rows take 610 MiB, half of them 305
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    runner.prefill(prompts, prefixes, first_slot=0)
except (MemoryError, RuntimeError) as error:
    assert is_out_of_memory(error), error
    fewer = runner.prefill(prompts[:16], prefixes[:16], first_slot=0).logits_RV
    assert (fewer[:1] == expected).all()
    print("half of them")
else:
    print("all of them")
"""


@pytest.mark.slow
def test_a_process_at_its_memory_limit_continues_with_fewer_rows() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert (ran.returncode, ran.stdout) == (0, "half of them\n"), ran.stderr
