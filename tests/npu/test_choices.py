"""The choice of operators for a chip and a model. These tests need no torch_npu."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.devices.npu_operators import (
    FAMILIES,
    FUSED,
    LAYOUT,
    PLAIN,
    TILED,
    UNKNOWN,
    ChipFamily,
    choose,
    family_of,
)
from llama_adapter.runtime.operators import ATEN, Operators

LLAMA_7B = DecoderConfig(
    vocab_size=32000, dim=4096, num_layers=32, num_heads=32, ffn_dim=11008, norm_eps=1e-6, context=512
)
FULL = SimpleNamespace(**{fused.needs: lambda *_: None for fused in FUSED if fused.needs})
# `lay_out_rotary` goes with `rotate`, and no chip has an operator of its own for `geglu`.
NAMES = set(Operators.__dataclass_fields__) - {"name", "note", "step", "lay_out_rotary", "geglu", "knows_causal"}
BY_NAME = {family.name: family for family in (*FAMILIES, UNKNOWN)}


def implementations(
    family: ChipFamily, *, config: DecoderConfig = LLAMA_7B, dtype: torch.dtype = torch.float16, **options
):
    operators, choices = choose(family, config, dtype, torch_npu=options.pop("torch_npu", FULL), **options)
    return (
        operators,
        {choice.operator: choice.implementation for choice in choices},
        {c.operator: c.reason for c in choices},
    )


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("910", {"store"}),
        ("310P", {"rms_norm", "rotate", "swiglu"}),
        ("A2", NAMES),
        ("310B", set()),
        ("A3", NAMES),
        ("950", {"rotate", "store"}),
        ("unknown", set()),
    ],
)
def test_each_family_gets_the_operators_that_are_documented_for_it(family: str, fused: set[str]) -> None:
    operators, chosen, reasons = implementations(BY_NAME[family])

    assert set(reasons) == {*NAMES, LAYOUT}
    assert all(reasons.values())
    del chosen[LAYOUT]
    assert {name for name, implementation in chosen.items() if implementation != "aten"} == fused
    for name in NAMES:
        assert (getattr(operators, name) is getattr(ATEN, name)) == (name not in fused), name
    assert (operators.lay_out_rotary is ATEN.lay_out_rotary) == ("rotate" not in fused)
    assert all(name in operators.name for name in fused)


@pytest.mark.parametrize("family", BY_NAME)
def test_plain_torch_can_be_chosen(family: str) -> None:
    operators, chosen, reasons = implementations(BY_NAME[family], wanted="aten")

    assert operators == ATEN
    assert set(chosen.values()) == {"aten", PLAIN}
    assert set(reasons.values()) == {"plain torch was asked for"}


def test_an_operator_that_refuses_the_heads_or_the_dtype_is_plain_torch() -> None:
    small_heads = dataclasses.replace(LLAMA_7B, head_dim=0, num_kv_heads=0, num_heads=128)
    operators, _, reasons = implementations(BY_NAME["A2"], config=small_heads)
    assert operators.rotate is ATEN.rotate
    assert operators.rms_norm is not ATEN.rms_norm
    assert reasons["rotate"] == "npu_apply_rotary_pos_emb needs heads of size 64 or 128, and these have 32"

    operators, _, reasons = implementations(BY_NAME["310P"], dtype=torch.bfloat16)
    assert operators == ATEN
    assert reasons["rms_norm"] == "npu_rms_norm does not take bfloat16 on 310P"


@pytest.mark.parametrize("missing", [fused for fused in FUSED if fused.needs], ids=lambda fused: fused.needs)
def test_an_older_torch_npu_without_an_operator_falls_back_to_plain_torch(missing) -> None:
    older = SimpleNamespace(**{name: value for name, value in vars(FULL).items() if name != missing.needs})

    operators, _, reasons = implementations(BY_NAME["A2"], torch_npu=older)

    assert getattr(operators, missing.operator) is getattr(ATEN, missing.operator)
    assert reasons[missing.operator] == f"this torch_npu has no {missing.needs}"


@pytest.mark.parametrize(
    ("family", "dtype", "layout", "reason"),
    [
        ("310P", torch.float16, TILED, "310P would rearrange plain weights at every call"),
        ("910", torch.float16, TILED, "910 would rearrange plain weights at every call"),
        ("310P", torch.float32, PLAIN, "tiles are for float16, and these weights are float32"),
        ("A2", torch.float16, PLAIN, "A2 multiplies by plain weights as they are"),
        ("unknown", torch.float16, PLAIN, "unknown multiplies by plain weights as they are"),
    ],
)
def test_linear_weights_are_tiled_where_that_pays(family: str, dtype: torch.dtype, layout: str, reason: str) -> None:
    _, chosen, reasons = implementations(BY_NAME[family], dtype=dtype)

    assert (chosen[LAYOUT], reasons[LAYOUT]) == (layout, reason)


def test_a_code_of_a_chip_belongs_to_one_family() -> None:
    codes = [code for family in FAMILIES for code in family.soc_versions]

    assert len(codes) == len(set(codes))
    assert family_of(202).name == "310P"
    assert family_of(223).name == "A2"
    assert family_of(104).name == "910"  # the first-generation Ascend910B, which belongs to family 910 despite its name
    assert family_of(999) == family_of(-1) == UNKNOWN
    assert UNKNOWN.graph_modes == ()
