"""Every use of torch_npu in our sources is found; test_chips.py compares the uses with the wheel."""

import pytest

from tests.npu import symbols


def test_functions_operators_and_modules_are_found_in_the_sources() -> None:
    wanted = {"torch_npu.npu.synchronize", "torch_npu.npu_swiglu", "torchair.get_npu_backend"}
    assert wanted <= {use.path for use in symbols.all_uses()}


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


def test_graphs_are_compiled_by_the_backends_that_are_compared() -> None:
    named = [call["backend"] for call in symbols.compile_calls() if "backend" in call]

    assert tuple(named) == symbols.BACKENDS
    assert all(call["fullgraph"] and not call["dynamic"] for call in symbols.compile_calls())
