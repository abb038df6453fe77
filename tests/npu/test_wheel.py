"""The real torch_npu: everything that we call exists as we call it, and its meta kernels agree with our references."""

import pytest

from tests.npu import symbols
from tests.npu.wheel import FakeNpu

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
