"""Graph modes: torch_npu's own compiler accepts our decode step, and its graph computes the same as eager mode.

Capture and replay are acted out on the host (tests/npu/inside/graphs.py). `ge_graph` needs the graph engine of CANN, of
which nothing can be acted out: only the signatures are checked, in test_wheel.py.
"""

import pytest

from tests.npu.wheel import FakeNpu

pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]


def test_replayed_decode_steps_give_what_eager_ones_give(npu: FakeNpu) -> None:
    report = npu.report("graphs", soc="Ascend910B3")["npugraph_ex"]

    assert report["graph"]["ids"] == report["eager"]["ids"]
    assert report["graph"]["scores"] == report["eager"]["scores"]
    assert report["captures"] > 0
    assert report["replays"] > report["captures"]


def test_a_graph_uses_fused_operators_and_writes_into_the_cache_without_copies(npu: FakeNpu) -> None:
    calls = npu.report("graphs", soc="Ascend910B3")["npugraph_ex"]["calls"]
    used = {name.removeprefix("npu::") for name in calls if name.startswith("npu::")}

    assert used >= {"npu_rms_norm", "npu_swiglu", "npu_fusion_attention_v3"}
    assert "npu_apply_rotary_pos_emb" not in used
    assert calls["npu::scatter_update_"] > 0
    assert not {"npu::scatter_update", "aten::select_scatter", "aten::slice_scatter"} & calls.keys()
