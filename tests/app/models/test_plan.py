"""`doctor --plan`: memory of each device, computed from shapes only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import llama_adapter.app.models.memory_fit
from llama_adapter import Captioner
from llama_adapter.app.command_line.doctor.planning import least_times
from llama_adapter.app.models.plan import DevicePlan, PlanJob, PlannedModel, device_plan, device_plans, planned_model
from llama_adapter.app.models.roofline import Ceiling, NumberSizes
from llama_adapter.app.models.sight import encoding_bytes
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.memory_plan import MemoryPlan
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.vision.config import ClipConfig, ConnectorConfig, VisionConfig
from tests.app.command import Run
from tests.app.golden import GOLDEN, model_options
from tests.app.picture_models import save

GB = 10**9


def plans_of(size: str, *, devices: tuple[int, ...] = (1, 2, 4, 8), rows: int = 8) -> dict[tuple[str, int], DevicePlan]:
    model = planned_model(PlanJob(spec=CaptionerSpec(), size=size))
    made = device_plans(model, num_devices=devices, device_bytes=(21 * GB, 32 * GB, 64 * GB), num_rows=rows)
    return {(plan.numbers.partition(",")[0], plan.num_devices): plan for plan in made}


@pytest.mark.parametrize("options", [{}, model_options(), model_options("LORA-BIAS-TINY"), {"llama_dir": "SmolVLM"}])
def test_the_plan_of_one_device_is_the_one_that_runs(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "SmolVLM" in options.values():
        options = {"llama_dir": str(save(tmp_path, "smolvlm"))}
    seen: list[MemoryPlan] = []
    monkeypatch.setattr(
        llama_adapter.app.models.memory_fit, "check_memory", lambda plan, *args, **named: seen.append(plan)
    )
    # On a device, all of the encoder must still be loaded; on the CPU, only the part that is still in its file.
    monkeypatch.setattr(llama_adapter.app.models.memory_fit, "is_file_backed", lambda tensors: [True] * len(tensors))
    spec = CaptionerSpec(**options, device="cpu", dtype="float32", precision="float", batch_size=4)
    Captioner.from_spec(spec).close()
    plans = device_plans(planned_model(PlanJob(spec=spec)), num_devices=[1], device_bytes=[GB], num_rows=4, padding=1)
    plan, ran = next(plans), seen[-1]

    assert plan.dtype == "float32"
    assert (plan.weights + plan.encoder, plan.keys_and_values + plan.prefix) == (ran.weights, ran.slots)
    assert (plan.computing, plan.loading, plan.first) == (ran.activations, ran.loading, ran.total)


DECODER = DecoderConfig(dim=64, num_layers=1, num_heads=1, vocab_size=64, ffn_dim=64, norm_eps=1e-5, context=64)
VISION = VisionConfig(
    clip=ClipConfig(image_size=32, patch_size=2, width=512, num_layers=1, num_heads=8, output_dim=512),
    query=ConnectorConfig(num_queries=257, output_dim=64),
)
PICTURES = PictureFormat(token="<image>", token_id=1, tokens_each=257, most_squares=3)
ROW = 2 * (257 * (2 * 2048 + 4 * 512) + 3 * 257 * 64)  # bytes of the encoder of one square, and of all tokens


@pytest.mark.parametrize(
    ("pictures", "vision", "num_bytes"), [(PICTURES, VISION, ROW), (PICTURES, None, 0), (None, VISION, 0)]
)
def test_each_row_has_memory_for_the_tokens_of_its_picture_and_the_encoder_of_one_square(
    pictures: PictureFormat | None, vision: VisionConfig | None, num_bytes: int
) -> None:
    model = PlannedModel(name="toy", decoder=DECODER, vision=vision, pictures=pictures)
    plan = device_plan(model, dtype=torch.float16, precision="float", device_bytes=[GB], num_rows=4)

    assert encoding_bytes(pictures, vision, DECODER, itemsize=2) == num_bytes
    assert (plan.computing == 4 * ROW) == (num_bytes > 0)


def test_sizes_of_65b_are_those_of_its_shapes() -> None:
    plans = plans_of("65B")
    whole, eighth = plans["float16", 1], plans["float16", 8]

    assert whole.weights / 2 == pytest.approx(65.3e9, rel=1e-3)
    places = 8 * 128 + 384  # a quarter of 512 for each row, and the rest for one
    assert whole.keys_and_values == places * 80 * 8192 * 2 * 2
    assert whole.prefix == 8 * 79 * 10 * 8192 * 2 * 2
    assert eighth.keys_and_values * 8 == whole.keys_and_values
    uneven = 80 * 3 * 8192 * 64 * 2  # rank 0 has 22 of 172 blocks of 128 units, half a block above an eighth
    assert whole.weights / 8 < eighth.weights - uneven < whole.weights / 8 * 1.01  # all ranks have norms and queries
    assert eighth.first - eighth.others == eighth.encoder
    assert plans["int4", 1].weights / plans["int8", 1].weights == pytest.approx(0.57, abs=0.02)
    assert [plans["float16", number].rows[21 * GB] > 0 for number in (1, 2, 4, 8)] == [False, False, False, True]


def test_more_devices_than_heads_are_refused() -> None:
    plans = plans_of("30B", devices=(8, 64))

    assert plans["int8", 64].refusal == "it has 52 heads, so 52 ranks are the most"
    assert plans["int8", 8].refusal == ""  # the first rank has 7 of the 52 heads


def test_the_command_prints_a_table_or_json(run: Run, snapshot: Any) -> None:
    flags = ["--devices", "1,2,5", "--device-memory", "16MB,0.1GB", "--batch-size", "2"]

    printed = run("doctor", "--plan", "tiny", flags)
    assert (printed.code, printed.err) == (0, "")
    assert printed.out == snapshot
    told = json.loads(run("doctor", "--plan", "tiny", flags, "--json").out)
    assert told["decoder"]["num_heads"] == 4
    assert [(plan["precision"], plan["num_devices"]) for plan in told["plans"][:3]] == [("float", n) for n in (1, 2, 5)]
    assert told["plans"][2]["refusal"]
    assert set(told["plans"][0]["rows"][0]) == {"device_bytes", "rows", "fits"}


def test_without_devices_this_machine_is_answered_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.runtime.ceilings._HOST_BUFFER", 64 << 20)
    printed = run("doctor", "--plan", "tiny", "--batch-size", "2")
    assert printed.out.startswith("This machine: ")
    assert "pictures/s, 2 rows" in printed.out
    planning = "llama_adapter.app.command_line.doctor.planning"
    monkeypatch.setattr(f"{planning}.measure_bandwidth", lambda backend: 1e10)  # once is enough
    monkeypatch.setattr(f"{planning}.measure_matmul", lambda backend, **product: 1e11)
    own = json.loads(run("doctor", "--plan", "tiny", "--batch-size", "2", "--json").out)["this_machine"]
    assert own["free_bytes"] > 0
    for one in own["formats"]:
        assert one["bytes"] < own["free_bytes"]
        assert 0 < one["least"]["picture_ms"] < one["least"]["first_token_ms"]
        assert one["flops_per_s"] > 0
    many = json.loads(run("doctor", "--plan", "tiny", "--batch-size", "100000", "--json").out)["this_machine"]
    for one in many["formats"]:  # as many rows as fit, also if they are fewer
        assert 0 < one["rows"] < 100_000
        assert one["least"]["pictures_per_s"] > 0
    large = json.loads(run("doctor", "--plan", "400000x4x4x4", "--json").out)["this_machine"]
    assert {(one["rows"], one["least"]) for one in large["formats"]} == {(0, None)}


def test_the_page_of_large_models_has_what_the_command_prints(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured rates and the free memory are those of the page."""
    page = (Path(__file__).parents[3] / "docs" / "large-models.md").read_text(encoding="utf-8")
    planning, rates = "llama_adapter.app.command_line.doctor.planning", iter([481e9, 961e9, 1526e9, 1539e9])
    monkeypatch.setattr(f"{planning}.measure_bandwidth", lambda backend: 43.8e9)
    monkeypatch.setattr(f"{planning}.measure_matmul", lambda *_, **__: next(rates))
    monkeypatch.setattr(CpuBackend, "free_bytes", lambda backend: 24_500_000_000)
    machine, _, devices = run("doctor", "--plan", "7B").out.partition("\n\nLLaMA 7B")
    larger = page.partition("`llama-adapter doctor --plan 65B` gives")[2].split("```")[1].strip().splitlines()

    assert f"LLaMA 7B{devices}" in page
    assert set(larger) < set(run("doctor", "--plan", "65B", "--devices", "1,2,4,8").out.splitlines())
    if CpuBackend().computes_in("int4", torch.float32):  # else, weights are widened
        assert machine in page


def test_the_least_times_follow_from_the_sizes() -> None:
    """A step reads every weight once, and a picture's encoder is bound by arithmetic."""
    model = planned_model(PlanJob(spec=CaptionerSpec(), size="7B"))
    ceiling, sizes = Ceiling(bytes_per_s=1e9, flops_per_s=1e12), NumberSizes(weight=2, other=2)
    rates = least_times(model, ceiling=ceiling, sizes=sizes, num_rows=1)

    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert rates.token_ms == pytest.approx(weights * 2 / 1e9 * 1e3, rel=0.01)  # and the cache
    assert rates.pictures_per_s == pytest.approx(1e3 / (rates.first_token_ms + 19 * rates.token_ms))


def test_llama_alone_and_chat_have_no_encoder() -> None:
    spec = CaptionerSpec(llama_dir=str(GOLDEN / "LLaMA"), llama_type="TINY", context=40)
    model = planned_model(PlanJob(spec=spec))

    assert (model.vision, model.decoder.context, model.decoder.num_adapter_layers) == (None, 40, 0)
    plan = next(device_plans(model, num_devices=[2], device_bytes=[GB], num_rows=1))
    assert (plan.encoder, plan.prefix) == (0, 0)
    assert plan.first == plan.others
