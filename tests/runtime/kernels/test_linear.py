"""The kernels' linear layers compute the same as plain ones, and each row as if it were alone."""

import copy
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.devices.cpu import PackedLinear
from llama_adapter.runtime.devices.cpu_linear import NativeLinear, can_take, install_kernels
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.schemes.int4 import unpacked
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import scheme_of
from tests.bounds import sums, unit
from tests.llm.toys import NEEDS_KERNELS, toy_decoder
from tests.runtime.kernels.instruction_sets import library_for
from tests.runtime.kernels.integer_reference import GROUP, MIDDLE, int4_linear, int8_linear

# Of inputs, with numbers of outputs, and whether there is a bias. Rows of 9000 are summed in parts, which are larger
# for many rows.
SHAPES = [((1, 48), 80, True), ((5, 48), 64, False), ((2, 7, 128), 1, True), ((97, 132), 65, False)]
SHAPES += [((200, 300), 200, True), ((0, 48), 80, True), ((7, 4), 130, False)]
SHAPES += [pytest.param((30, 9000), 70, True, id="long_rows"), pytest.param((60, 9000), 70, False, id="many_long_rows")]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}


@pytest.fixture(autouse=True)
def keep_the_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(kind: torch.dtype, *, num_in: int, num_out: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(num_in + num_out)
    linear = nn.Linear(num_in, num_out, bias=bias).requires_grad_(False)
    if kind.is_floating_point:
        return linear.to(kind)
    scheme = scheme_of(kind)
    assert scheme is not None
    store_parts(linear, scheme.quantise(linear.weight))
    return linear


def inputs(kind: torch.dtype, count: int) -> int:
    """The number of inputs, rounded up to one that weights of this kind can have."""
    step = GROUP if kind == torch.uint8 else 1
    return -(-count // step) * step


def expected(linear: nn.Linear, x: Tensor) -> Tensor:
    if linear.weight.dtype == torch.int8:
        return int8_linear(x, linear.weight, linear.get_buffer("weight_scale"), linear.bias)
    if linear.weight.dtype == torch.uint8:
        return int4_linear(x, linear.weight, linear.get_buffer("weight_scale"), linear.bias)
    bias = None if linear.bias is None else linear.bias.float()
    return nn.functional.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


def exact_weight(linear: nn.Linear) -> Tensor:
    """The float32 weight (O, F) that stored integers stand for."""
    scale = linear.get_buffer("weight_scale").float()
    if linear.weight.dtype == torch.int8:
        return linear.weight.float() * scale[:, None]
    return (unpacked(linear.weight).float() - MIDDLE) * scale.repeat_interleave(GROUP, dim=1)


def is_near(ours: Tensor, linear: nn.Linear, x: Tensor) -> None:
    """Both round activations to 8 bits alike, so the differences are those of sums, and of the type of the results."""
    wanted = expected(linear, x)
    assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
    weight = linear.weight if linear.weight.is_floating_point() else exact_weight(linear)
    results = 0.0 if ours.dtype == torch.float32 else 2 * unit(ours.dtype) * wanted.double().abs()
    assert bool(((ours.double() - wanted.double()).abs() <= sums(x, weight, linear.bias) + results).all())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def activations(*shape: int, kind: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return x.to(torch.bfloat16) if kind == torch.bfloat16 else x


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("shape", "num_out", "bias"), SHAPES)
def test_a_layer_equals_the_one_it_is_made_of(
    kind: torch.dtype, shape: tuple[int, ...], num_out: int, bias: bool, library: Library
) -> None:
    shape = (*shape[:-1], inputs(kind, shape[-1]))
    linear = layer(kind, num_in=shape[-1], num_out=num_out, bias=bias)
    if kind == torch.int8:
        linear.weight[0, :2] = -128  # of another program: ours are -127 at least
    native, x = NativeLinear(linear, library=library), activations(*shape, kind=kind)
    if not kind.is_floating_point:  # groups that share a scale have several sizes
        x *= torch.logspace(1, -3, 128).repeat(-(-shape[-1] // 128))[: shape[-1]]

    is_near(native(x), linear, x)
    view = x.transpose(0, -1).contiguous().transpose(0, -1)
    is_near(native(view), linear, view)
    if not kind.is_floating_point:
        is_near(native(x.bfloat16()), linear, x.bfloat16())


def test_a_dropped_product_is_more_than_rounding(library: Library) -> None:
    linear, x = layer(torch.float32, num_in=9000, num_out=70), activations(30, 9000, kind=torch.float32)
    x[:, 17] = 1.0
    ours = NativeLinear(linear, library=library)(x) - linear.weight[:, 17]

    assert bool(((ours - expected(linear, x)).abs() > sums(x, linear.weight, linear.bias)).float().mean() > 0.8)


def test_rows_that_no_cache_holds_are_computed_in_groups(library: Library) -> None:
    linear = layer(torch.float32, num_in=4500, num_out=130)  # a group is two parts of 96 rows
    native, x = NativeLinear(linear, library=library), activations(270, 4500, kind=torch.float32)

    torch.set_num_threads(2)

    is_near(native(x), linear, x)


def test_a_bias_of_the_call_takes_the_place_of_the_own_one(library: Library) -> None:
    linear, x = layer(torch.float32, num_in=48, num_out=80), activations(3, 48, kind=torch.float32)
    native, bias = NativeLinear(linear, library=library), torch.arange(80.0)

    difference = native(x, bias) - native(x) - (bias - linear.bias)
    assert bool((difference.abs() <= 2 * sums(x, linear.weight, bias, linear.bias)).all())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_in", [768, 9000])
def test_a_row_has_the_same_bits_alone_and_among_others_and_by_any_number_of_threads(
    kind: torch.dtype, num_in: int, library: Library
) -> None:
    num_in = inputs(kind, num_in)
    native = NativeLinear(layer(kind, num_in=num_in, num_out=200), library=library)
    x = activations(110, num_in, kind=kind)
    x[3] *= 1000.0  # would spoil a scale that the batch shared

    torch.set_num_threads(1)
    alone = torch.cat([native(row[None]) for row in x])
    together = native(x)
    torch.set_num_threads(3)
    shared_out = native(x)

    assert torch.equal(alone, together)
    assert torch.equal(together, shared_out)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("num_in", [12, 44, 160, 300], ids=lambda num_in: f"{num_in} inputs")
def test_products_of_rows_in_pairs_have_the_bits_of_dot_products(kind: torch.dtype, num_in: int) -> None:
    pairs, dots = library_for("neon", ("asimddp", "i8mm")), library_for("neon", ("asimddp",))
    num_in = inputs(kind, num_in)  # in int8 the last group is shorter, and its last inputs are 4, not 8
    linear, x = layer(kind, num_in=num_in, num_out=70), activations(13, num_in, kind=kind)
    by_pairs, by_dots = NativeLinear(linear, library=pairs), NativeLinear(linear, library=dots)

    for num_rows in range(1, 14):
        assert torch.equal(by_pairs(x[:num_rows]), by_dots(x[:num_rows])), f"{num_rows} rows"


@pytest.mark.parametrize("shape", [(1, 48), (5, 44), (2, 7, 132), (97, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_calibrated_layer_rounds_all_inputs_by_its_scale(
    shape: tuple[int, ...], dtype: torch.dtype, library: Library
) -> None:
    linear, x = layer(torch.int8, num_in=shape[-1], num_out=80), activations(*shape, kind=torch.int8).to(dtype)
    linear.register_buffer("weight_input_scale", torch.tensor([2.0**-7]))  # many inputs are above 127 / 128

    native = NativeLinear(linear, library=library)

    levels = (x.float() * 128).round().clamp(-127, 127)
    assert levels.abs().max() == 127
    exact = (levels.double() / 128) @ exact_weight(linear).double().T + linear.bias
    limit = sums(levels / 128, exact_weight(linear), linear.bias) + 2 * unit(dtype) * exact.abs()
    assert bool(((native(x).double() - exact).abs() <= limit).all())
    part = native.layer.part(64, 16)
    assert part.input_scale == 2.0**-7
    spoilt = x.clone()
    spoilt.view(-1, shape[-1])[0, 3] = float("nan")
    rows = native(spoilt).view(-1, 80)
    assert rows[0].isnan().all()
    assert torch.equal(rows[1:], native(x).view(-1, 80)[1:])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_affects_its_row_only(kind: torch.dtype, broken: float, library: Library) -> None:
    native = NativeLinear(layer(kind, num_in=256, num_out=70), library=library)
    for num_rows in (4, 20):
        x = activations(num_rows, 256, kind=kind)
        before = native(x)
        x[2, 100] = broken

        after = native(x)

        assert not after[2].isfinite().any()
        others = [row for row in range(num_rows) if row != 2]
        assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8], ids=["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-41])
def test_zeros_and_subnormal_activations_give_the_bias(kind: torch.dtype, value: float, library: Library) -> None:
    linear = layer(kind, num_in=128, num_out=70)

    ours = NativeLinear(linear, library=library)(torch.full((2, 128), value))

    torch.testing.assert_close(ours, linear.bias.expand(2, -1))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, 24),
        torch.zeros(()),
        torch.zeros(4, 48, dtype=torch.bfloat16),
        torch.zeros(4, 48, dtype=torch.float64),
        torch.zeros(4, 48, device="meta"),
    ],
    ids=["another width", "no width", "bfloat16", "float64", "elsewhere"],
)
def test_other_inputs_are_refused(x: Tensor, library: Library) -> None:
    native = NativeLinear(layer(torch.float32, num_in=48, num_out=80), library=library)

    with pytest.raises(RuntimeError, match="48 inputs"):
        native(x)


def test_layers_with_addresses_cannot_be_copied(library: Library) -> None:
    native = NativeLinear(layer(torch.float32, num_in=48, num_out=80), library=library)

    with pytest.raises(ValueError, match="pointers"):
        copy.deepcopy(native)


def test_threads_release_their_memory_when_they_end(library: Library) -> None:
    native = NativeLinear(layer(torch.bfloat16, num_in=4096, num_out=64), library=library)
    x = activations(500, 4096, kind=torch.float32)  # 4 MB in bfloat16
    torch.set_num_threads(1)
    native(x)
    before = resident_bytes()

    for _ in range(30):
        thread = threading.Thread(target=native, args=(x,))
        thread.start()
        thread.join()

    assert resident_bytes() - before < 60e6


def test_two_callers_at_once_get_the_same_bits(library: Library) -> None:
    native = NativeLinear(layer(torch.float32, num_in=512, num_out=640), library=library)
    x = activations(40, 512, kind=torch.float32)
    expected_bits = native(x)
    torch.set_num_threads(3)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: native(x), range(200)))

    assert all(torch.equal(result, expected_bits) for result in results)


def test_plain_weights_are_released_one_by_one(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48)) for _ in range(5)])
    kept = [weakref.ref(part[0].weight) for part in module]
    alive = []
    monkeypatch.setattr(
        "llama_adapter.runtime.devices.cpu_linear.NativeLinear",
        lambda linear, *, library: alive.append(sum(weight() is not None for weight in kept)) or nn.Identity(),
    )

    install_kernels(module, library=library)

    assert alive == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_part_of_a_layer_is_a_layer_in_the_same_memory(kind: torch.dtype, library: Library) -> None:
    native = NativeLinear(layer(kind, num_in=64, num_out=192), library=library)
    x = torch.randn(3, 64)
    part, out = native.layer.part(64, 100), torch.empty(3, 100)

    library.linear(ctypes.addressof(part), x.data_ptr(), 0, 3, out.data_ptr(), 1)

    assert torch.equal(out, native(x)[:, 64:164])


def test_only_supported_linear_layers_are_replaced(library: Library) -> None:
    odd, half = nn.Linear(6, 4), nn.Linear(8, 4, dtype=torch.float16)
    assert not can_take(odd, activations=torch.float32)
    assert not can_take(layer(torch.uint8, num_in=48, num_out=4), activations=torch.float32)
    install_kernels(left := nn.Sequential(odd, half), library=library)
    assert list(left) == [odd, half]
    narrow = nn.Sequential(layer(torch.uint8, num_in=48, num_out=4), layer(torch.uint8, num_in=64, num_out=4))
    CpuBackend().prepare(narrow)  # a width that int4 kernels lack is widened
    assert [one.weight_dtype for one in narrow] == [torch.float32, torch.uint8]
    decoder = toy_decoder()
    embedding = decoder.embedding

    install_kernels(decoder, library=library)
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert decoder.embedding is embedding


@NEEDS_KERNELS
def test_plain_operators_use_no_kernels() -> None:
    plain, ours = nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))
    backend = CpuBackend()

    backend.prepare(plain, wanted="aten")
    assert backend.kernels is None
    backend.prepare(ours)
    assert backend.kernels is find_library().library

    assert isinstance(plain[0], PackedLinear)
    assert isinstance(ours[0], NativeLinear)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_int8_weights_among_half_types_compute_or_are_widened(half: torch.dtype, library: Library) -> None:
    module = nn.Sequential(nn.LayerNorm(64, dtype=half), layer(torch.int8, num_in=64, num_out=8, bias=False))
    x = torch.randn(3, 64, dtype=half)
    exact = module[0](x).float() @ (module[1].weight.float() * module[1].get_buffer("weight_scale")[:, None]).T

    CpuBackend().prepare(module)

    assert isinstance(module[1], NativeLinear) == (half == torch.bfloat16)
    torch.testing.assert_close(module(x).float(), exact, atol=0.1, rtol=0.05)
