"""torch_npu and its chips: signatures, and the whole model with torch_npu's dispatch gives the same ids as on the CPU.

One process tries everything and prints the results, which the tests check. Kernels run on the host, so the tests do not
show how exact the real ones are. Fused operators are compared with float32 references that round once; real ones may
round at other points. Capture and replay of graphs are simulated on the host (tests/npu/inside/graphs.py). `ge_graph`
needs CANN's graph engine, which has no stand-in, so only its signatures are checked.
"""

import pytest
import torch

from tests.llm.toys import rounding
from tests.npu import symbols
from tests.npu.inside.decoder import FUSED, GROUPED, SMALL
from tests.npu.wheel import CHIPS, SOC, WHOLE_MODEL, FakeNpu

# The chip's own operators that must be called, for heads of 64 in float16.
KERNELS = {
    "Ascend310P3": {"npu_rms_norm", "npu_apply_rotary_pos_emb", "npu_swiglu", "npu_format_cast"},
    "Ascend910B3": {
        "npu_rms_norm",
        "npu_apply_rotary_pos_emb",
        "npu_swiglu",
        "npu_fusion_attention_v3",
        "scatter_update_",
    },
    "Ascend910A": {"scatter_update_", "npu_format_cast"},
}
pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]
on_chips_of_the_whole_model = pytest.mark.parametrize("soc", WHOLE_MODEL)


@pytest.mark.parametrize("soc", CHIPS)
def test_a_chip_is_opened_with_what_torch_npu_says_of_it(npu: FakeNpu, soc: str) -> None:
    facts = npu.reports()[soc]["device"]

    assert facts["name"] == f"npu:0 ({soc})"
    assert facts["family"] == dict(zip(CHIPS, ("310P", "A2", "910", "310B", "A3", "950"), strict=True))[soc]
    assert ("bfloat16" in facts["capabilities"]["dtypes"]) == facts["bfloat16"]
    assert facts["capabilities"]["static_shapes"]
    # The family's table sends attention to torch_npu only if torch_npu calls the documented fused kernel.
    fused = facts["attention"] == "npu::npu_fusion_attention_v3"
    assert fused or facts["family"] not in ("A2", "A3")


def test_the_device_counts_memory_and_time(npu: FakeNpu) -> None:
    facts = npu.reports()[SOC]["device"]

    assert facts["taken"] >= 32 << 20
    assert facts["given_back"] >= 32 << 20  # by `free_bytes`, which empties caches
    assert facts["elapsed_ms"] > 0
    assert facts["backwards_ms"] == -facts["elapsed_ms"]
    assert facts["out_of_memory"][0] == "OutOfMemoryError"


@pytest.mark.proves("traces", "NPU")
def test_the_profiler_runs_and_writes_into_its_folder(npu: FakeNpu) -> None:
    # Without CANN's libmsprofiler.so, torch_npu prints a message on stdout and records nothing.
    assert npu.reports()["profiled"] == ["profiler_info.json", "profiler_metadata.json"]


def test_a_compiled_program_runs_on_its_device_in_any_thread(npu: FakeNpu) -> None:
    assert npu.reports()["thread"] == [0, 1]


def test_a_device_or_graph_mode_that_is_absent_is_an_error_with_those_present(npu: FakeNpu) -> None:
    kind, message, hint = npu.reports()[SOC]["device"]["too_many"]
    assert (kind, message) == ("DeviceError", "No device named `npu:7`; available: npu:0")
    assert "--device" in hint

    kind, message, hint = npu.reports()["Ascend310P3"]["device"]["no_graph"]
    assert kind == "DeviceError"
    assert "Ascend310P3" in message
    assert "eager" in hint


def test_the_page_of_symbols_is_up_to_date(npu: FakeNpu) -> None:
    assert symbols.PAGE.read_text(encoding="utf-8") == symbols.current_page(npu), "run `python -m tests.npu.symbols`"


# Our calls


def test_the_wheel_takes_every_call_as_we_make_it(npu: FakeNpu) -> None:
    wheel = npu.reports()["wheel"]

    assert wheel["methods"] == list(symbols.METHODS)
    assert wheel["problems"] == []
    assert set(symbols.BACKENDS) <= set(wheel["backends"])
    assert set(symbols.BACKEND_OPTIONS) <= set(wheel["options"])
    before, after = wheel["rounding"]  # float32 is not rounded once the device is open
    assert before == {"torch_npu.npu.conv.allow_hf32": True, "torch_npu.npu.matmul.allow_hf32": False}
    assert after == dict.fromkeys(before, False)


def test_meta_kernels_agree_with_our_references(npu: FakeNpu) -> None:
    wheel = npu.reports()["wheel"]

    assert set(wheel["references"]) == {
        path.removeprefix("torch_npu.")
        for path in symbols.OPERATORS
        if "format_cast" not in path and "int4pack" not in path  # these have no meta kernel
    }
    assert wheel["attention"]["meta"] == wheel["attention"]["ours"]


# The whole model


def runs(npu: FakeNpu, soc: str):
    return {run["label"]: run for run in npu.reports()[soc]["runs"]}


def kernels(calls: dict[str, int]) -> set[str]:
    return {name.removeprefix("npu::") for name in calls if name.startswith("npu::")}


@on_chips_of_the_whole_model
@pytest.mark.proves("embedded model", "NPU")
def test_pictures_get_the_same_captions_as_on_the_cpu(npu: FakeNpu, soc: str) -> None:
    captions = npu.reports()[soc]["captions"]

    assert captions["given"] == captions["expected"]
    assert len(captions["given"]) == 7
    assert captions["calls"]["aten::embedding"] > 0


@on_chips_of_the_whole_model
@pytest.mark.proves("continuous batching", "NPU")
@pytest.mark.proves("choices by scoring", "NPU")
@pytest.mark.proves("float32", "NPU")
@pytest.mark.proves("float16", "NPU")
@pytest.mark.proves("bfloat16", "NPU")
def test_plain_operators_give_exactly_what_the_cpu_gives(npu: FakeNpu, soc: str) -> None:
    plain = {label: run for label, run in runs(npu, soc).items() if label.endswith("aten")}

    assert len(plain) >= 2
    for label, run in plain.items():
        assert run["given"] == run["expected"], label
        assert kernels(run["calls"]) == set(), label


@on_chips_of_the_whole_model
@pytest.mark.proves("fused operators or kernels", "NPU")
def test_fused_operators_give_the_same_ids_in_float32_and_close_scores(npu: FakeNpu, soc: str) -> None:
    for label, run in runs(npu, soc).items():
        if label in ("fused float32 auto", "small float32 auto", "grouped float32 auto"):
            assert run["given"]["ids"] == run["expected"]["ids"], label
        size, name, _ = label.split()
        # The bound of any logit. A score is the sum of three log-probabilities at most.
        tolerance = rounding({"fused": FUSED, "small": SMALL, "grouped": GROUPED}[size], dtype=getattr(torch, name))
        assert run["given"]["scores"] == pytest.approx(run["expected"]["scores"], abs=tolerance), label


@on_chips_of_the_whole_model
def test_the_chip_runs_its_own_operators_where_they_fit(npu: FakeNpu, soc: str) -> None:
    assert kernels(runs(npu, soc)["fused float16 auto"]["calls"]) == KERNELS[soc]
    assert kernels(runs(npu, soc)["grouped float16 auto"]["calls"]) == KERNELS[soc]
    small = runs(npu, soc)["small float16 auto"]  # the fused rotation refuses its heads
    assert "npu_apply_rotary_pos_emb" not in kernels(small["calls"])
    assert small["choices"]["rotate"][0] == "aten"


@on_chips_of_the_whole_model
def test_only_linear_weights_in_float16_are_tiled(npu: FakeNpu, soc: str) -> None:
    report = runs(npu, soc)
    num_linear = 2 * 4 + 1  # four in each layer, and the head
    expected = 0 if soc == "Ascend910B3" else num_linear

    assert report["fused float16 auto"]["calls"].get("npu::npu_format_cast", 0) == expected
    for label in ("fused float16 aten", "fused float32 auto"):
        assert report[label]["calls"].get("npu::npu_format_cast", 0) == 0


@on_chips_of_the_whole_model
def test_tensors_of_host_and_device_are_not_mixed(npu: FakeNpu, soc: str) -> None:
    mixes = npu.reports()[soc]["mixes"]

    assert set(mixes.values()) == {"refused"}
    assert len(mixes) == 5


# Graph modes


@pytest.mark.proves("graphs", "NPU")
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_replayed_decode_steps_give_what_eager_ones_give(npu: FakeNpu, weights: str) -> None:
    report = npu.reports()["graphs"][weights]

    assert report["graph"] == report["eager"]  # ids and scores, to the bit
    assert report["captures"] > 0
    assert report["replays"] > report["captures"]


@pytest.mark.parametrize(("weights", "linear"), [("float32", set()), ("int4", {"npu_weight_quant_batchmatmul"})])
def test_a_graph_uses_fused_operators_and_writes_into_the_cache_without_copies(
    npu: FakeNpu, weights: str, linear: set[str]
) -> None:
    calls = npu.reports()["graphs"][weights]["calls"]
    used = kernels(calls)

    assert used >= {"npu_rms_norm", "npu_swiglu", "npu_fusion_attention_v3", *linear}
    assert "npu_apply_rotary_pos_emb" not in used
    assert calls["npu::scatter_update_"] > 0
    assert not {"npu::scatter_update", "aten::select_scatter", "aten::slice_scatter"} & calls.keys()
