"""The real torch_npu: everything that we call exists as we call it, and its meta kernels agree with our references."""

import pytest

from tests.npu import symbols
from tests.npu.wheel import CHIPS, FakeNpu

SOC = "Ascend910B3"


@pytest.fixture(scope="module")
def facts(npu: FakeNpu):
    return npu.report("wheel_facts", soc=SOC)


def contract(test):
    return pytest.mark.npu_contract(pytest.mark.slow(test))


def test_the_sources_call_nothing_of_torch_npu_that_the_table_lacks() -> None:
    used = {use.path for use in symbols.all_uses()} - set(symbols.MODULES.values())

    assert used == {*symbols.OPERATORS, *symbols.FUNCTIONS, *symbols.SETTINGS}


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("torch_npu.npu.f(1, a=2)", symbols.Use("torch_npu.npu.f", True, 1, ("a",))),
        ("self._torch_npu.f()", symbols.Use("torch_npu.f", True)),
        ("torch_npu.npu.config.x = 1", symbols.Use("torch_npu.npu.config.x")),
        ("configs.C()", symbols.Use("torchair.configs.compiler_config.C", True)),
    ],
)
def test_a_use_of_torch_npu_is_found_in_a_source(source: str, use: symbols.Use) -> None:
    assert list(symbols.uses(source)) == [use]


def test_graphs_are_compiled_by_the_backends_of_the_table() -> None:
    named = [call["backend"] for call in symbols.compile_calls() if "backend" in call]

    assert tuple(named) == symbols.BACKENDS
    assert all(call["fullgraph"] and not call["dynamic"] for call in symbols.compile_calls())


@contract
def test_operators_have_the_schemas_of_the_table(facts) -> None:
    assert facts["operators"] == symbols.OPERATORS


@contract
def test_functions_have_the_signatures_of_the_table(facts) -> None:
    assert facts["functions"] == symbols.FUNCTIONS
    assert facts["methods"] == list(symbols.METHODS)


@contract
def test_the_wheel_takes_every_call_as_we_make_it(facts) -> None:
    assert facts["problems"] == []


@contract
def test_float32_is_not_rounded_once_the_device_is_open(facts) -> None:
    before, after = facts["rounding"]

    assert before == {"torch_npu.npu.conv.allow_hf32": True, "torch_npu.npu.matmul.allow_hf32": False}
    assert after == dict.fromkeys(before, False)


@contract
def test_graph_backends_and_their_options_exist(facts) -> None:
    assert set(symbols.BACKENDS) <= set(facts["backends"])
    assert set(symbols.BACKEND_OPTIONS) <= set(facts["options"])


@contract
def test_meta_kernels_agree_with_our_references(facts) -> None:
    assert set(facts["references"]) == {
        path.removeprefix("torch_npu.") for path in symbols.OPERATORS if "format_cast" not in path
    }
    assert facts["attention"]["meta"] == facts["attention"]["ours"]


@contract
def test_the_page_of_symbols_is_up_to_date(npu: FakeNpu) -> None:
    assert symbols.PAGE.read_text(encoding="utf-8") == symbols.current_page(npu), "run `python -m tests.npu.symbols`"


@contract
@pytest.mark.parametrize("soc", CHIPS)
def test_a_chip_is_opened_with_what_torch_npu_says_of_it(npu: FakeNpu, soc: str) -> None:
    facts = npu.chip(soc)["device"]

    assert facts["name"] == f"npu:0 ({soc})"
    assert facts["family"] == dict(zip(CHIPS, ("310P", "A2", "910", "310B", "A3", "950"), strict=True))[soc]
    assert ("bfloat16" in facts["capabilities"]["dtypes"]) == facts["bfloat16"]
    assert facts["capabilities"]["collective"] == "hccl"
    assert facts["capabilities"]["static_shapes"]
    # The family's table sends attention to torch_npu only where that leads to the fused kernel that is documented.
    fused = facts["attention"] == "npu::npu_fusion_attention_v3"
    assert fused or facts["family"] not in ("A2", "A3")


@contract
def test_the_device_counts_memory_and_time(npu: FakeNpu) -> None:
    facts = npu.chip(SOC)["device"]

    assert facts["taken"] >= 32 << 20
    assert facts["given_back"] >= 32 << 20  # by `empty_caches`
    assert facts["total"] > facts["taken"]
    assert facts["elapsed_ms"] > 0
    assert facts["backwards_ms"] == -facts["elapsed_ms"]
    assert facts["out_of_memory"][0] == "OutOfMemoryError"


@contract
def test_a_device_that_is_not_there_is_named_with_those_that_are(npu: FakeNpu) -> None:
    kind, message, hint = npu.chip(SOC)["device"]["too_many"]

    assert (kind, message) == ("DeviceError", "No device named `npu:7`; available: npu:0")
    assert "--device" in hint


@contract
def test_a_graph_mode_that_a_chip_lacks_is_an_error_with_those_it_has(npu: FakeNpu) -> None:
    kind, message, hint = npu.chip("Ascend310P3")["device"]["no_graph"]

    assert kind == "DeviceError"
    assert "Ascend310P3" in message
    assert "eager" in hint
