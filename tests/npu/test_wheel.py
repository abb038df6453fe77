"""The table of everything that we call in torch_npu is complete; test_chips.py compares it with the wheel."""

import pytest

from tests.npu import symbols


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
