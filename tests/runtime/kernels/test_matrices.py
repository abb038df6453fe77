"""AMX computes what vectors compute: the same bits for integers, and bfloat16 in its own order of addition.

AMX is emulated, so that these tests need a processor with AVX-512 only. Where AMX exists, its bits are compared too.
"""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

from llama_adapter.runtime.devices.cpu_linear import NativeLinear, install_kernels, kernel_arrays
from llama_adapter.runtime.kernels.arrays import Blocks
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import scheme_of
from llama_adapter.vision.block import Block
from tests.runtime.kernels.instruction_sets import EMULATED_AMX, EmulatedAmx, emulated_amx, library_for
from tests.runtime.kernels.test_linear import layer

ROWS = (9, 10, 16, 17, 33, 50, 65, 130)  # vectors compute fewer than 10 rows of integers; a part has 64 rows
HEADS = 2


@pytest.fixture(scope="module", name="vectors")
def vectors_fixture() -> Library:
    return library_for("avx512", ("avx512_bf16",))


@pytest.fixture(scope="module", name="emulated")
def emulated_fixture() -> EmulatedAmx:
    return emulated_amx()


def spread(num_rows: int, num_in: int) -> torch.Tensor:
    """Activations whose groups have scales of several sizes."""
    x = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(3))
    return x * torch.logspace(1, -3, 128).repeat(-(-num_in // 128))[:num_in]


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("num_in", [96, 128, 288, 768])
def test_integers_have_the_bits_of_vectors(
    kind: torch.dtype, num_in: int, vectors: Library, emulated: EmulatedAmx
) -> None:
    linear, x = layer(kind, num_in=num_in, num_out=150), spread(max(ROWS), num_in)
    fewest = 10 if kind == torch.int8 else 12
    ours, expected = (NativeLinear(linear, library=library) for library in (emulated, vectors))

    for num_rows in ROWS:
        before = emulated.num_products()
        assert torch.equal(ours(x[:num_rows]), expected(x[:num_rows])), f"{num_rows} rows"
        assert (emulated.num_products() > before) == (num_rows >= fewest and num_in >= 128)


def stack(kind: torch.dtype, library: Library, *, head_dim: int) -> Blocks:
    torch.manual_seed(0)
    width = HEADS * head_dim
    module = nn.ModuleList(Block(width, num_heads=HEADS, hidden_dim=256, activation="quick_gelu") for _ in range(2))
    for linear in (one for one in module.requires_grad_(False).modules() if isinstance(one, nn.Linear)):
        scheme = scheme_of(kind)
        assert scheme is not None
        store_parts(linear, scheme.quantise(linear.weight))
    install_kernels(module, library=library)
    arrays = kernel_arrays(nn.ModuleDict({"blocks": module}))
    assert arrays is not None
    sizes = {"count": 2, "width": width, "hidden_dim": 256, "num_heads": HEADS}
    return Blocks(arrays, "blocks", **sizes, activation="quick_gelu", eps=1e-5, dtype="float32", library=library)


def test_wide_groups_of_an_encoder_have_the_bits_of_vectors(vectors: Library, emulated: EmulatedAmx) -> None:
    x_BTW = np.random.default_rng(0).standard_normal((37, 1, 128), np.float32)
    # Attention to a single token copies its value, so only linear layers differ.
    ours, expected = (stack(torch.int8, library, head_dim=64)(x_BTW) for library in (emulated, vectors))

    assert np.array_equal(ours, expected)


@pytest.mark.parametrize("head_dim", [8, 64, 72])
@pytest.mark.parametrize(("num_tokens", "num_kept"), [(5, 5), (17, 17), (33, 3), (33, 0), (150, 150)])
def test_attention_of_an_encoder_is_near_that_of_vectors(
    num_tokens: int, num_kept: int, head_dim: int, vectors: Library, emulated: EmulatedAmx
) -> None:
    x_BTW = np.random.default_rng(0).standard_normal((3, num_tokens, HEADS * head_dim), np.float32)
    ours, expected = (stack(torch.int8, library, head_dim=head_dim)(x_BTW, num_kept) for library in (emulated, vectors))
    alone = stack(torch.int8, emulated, head_dim=head_dim)(x_BTW[1:2], num_kept)

    # One rounding of activations to 8 bits may differ by a step, where a sum in another order is on the other side.
    assert np.abs(ours - expected).max(initial=0) <= 0.005 * np.abs(expected).max(initial=0)
    assert np.array_equal(ours, expected) == (head_dim < 32 or not num_kept)  # narrow heads are left to vectors
    assert np.array_equal(alone[0], ours[1])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8, torch.uint8], ids=["bfloat16", "int8", "int4"])
def test_the_emulation_has_the_bits_of_the_processor(kind: torch.dtype, emulated: EmulatedAmx) -> None:
    amx = library_for("avx512", ("avx512_bf16", "amx_int8"))
    if not amx.uses_amx:
        pytest.skip("the system refuses AMX")
    # The results are float32, which shows the order of additions.
    linear, x = layer(kind, num_in=288, num_out=150), spread(130, 288)
    ours, expected = (NativeLinear(linear, library=library) for library in (emulated, amx))

    for num_rows in (1, 5, *ROWS):
        assert torch.equal(ours(x[:num_rows]), expected(x[:num_rows])), f"{num_rows} rows"


def test_without_leave_of_the_system_vectors_compute(vectors: Library) -> None:
    program = """
        import sys

        import torch

        from llama_adapter.runtime.devices.cpu_linear import NativeLinear
        from tests.runtime.kernels.instruction_sets import emulated_amx
        from tests.runtime.kernels.test_linear import layer
        from tests.runtime.kernels.test_matrices import spread

        native = NativeLinear(layer(torch.bfloat16, num_in=300, num_out=150), library=emulated_amx())
        sys.stdout.write(repr(native(spread(20, 300)).tolist()))
    """
    command = ["/usr/bin/env", "NO_MATRICES=1", sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    linear, x = layer(torch.bfloat16, num_in=300, num_out=150), spread(20, 300)
    assert done.stdout == repr(NativeLinear(linear, library=vectors)(x).tolist())
    assert done.stdout != repr(NativeLinear(linear, library=emulated_amx())(x).tolist())


@pytest.mark.parametrize("name", ["avx512", EMULATED_AMX])
def test_nothing_is_read_or_written_beyond_a_call_s_memory(name: str) -> None:
    library_for(name)  # skips the test without the instructions
    command = [sys.executable, "-m", "tests.runtime.kernels.guarded", name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
