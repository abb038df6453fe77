"""The benchmark from its job to table, JSON and plot, on a tiny model. No test asserts a speed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.command_line.main import main
from llama_adapter.app.command_line.measuring.bench import BenchJob, run_bench
from llama_adapter.app.command_line.measuring.bench_report import format_table, write_plot
from llama_adapter.app.command_line.measuring.bench_result import BenchResult, Ceilings, Round, summarise
from llama_adapter.app.command_line.measuring.meters import Call
from llama_adapter.app.models.roofline import Work
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.plots import check_plot

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _small_buffers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_adapter.runtime.ceilings._HOST_BUFFER", 1 << 20)
        yield


def tiny_run(**changes: Any) -> BenchResult:
    values = {"random": "tiny", "batch_sizes": (1, 2), "pictures": 3, "rounds": 2, **changes}
    return run_bench(BenchJob(spec=CaptionerSpec(context=128), **values))


@pytest.fixture(scope="module")
def captions() -> BenchResult:
    """A run with the weights as they are."""
    return tiny_run(workload="caption")


def test_a_caption_run_has_every_token_and_every_stage(captions: BenchResult) -> None:
    assert captions.new_tokens == 64
    assert [batch.batch_size for batch in captions.batches] == [1, 2]
    for batch in captions.batches:
        assert batch.tokens_per_s / batch.pictures_per_s == pytest.approx(64)
        assert set(batch.programs) == {"encoder", "prefix", "prefill", "step"}
        assert batch.programs["step"].num_rows == batch.batch_size
        assert sum(batch.bounds.values()) == pytest.approx(1)
        assert len(batch.pictures_per_s_rounds) == 2
    # Three pictures in batches of two: 63 steps with two rows in each of two rounds. Steps for the third picture have
    # one row.
    assert captions.batches[1].programs["step"].num_calls == 2 * 63


def test_a_yesno_run_takes_one_pass_and_no_step_and_asks_a_question_of_ones_own() -> None:
    result = tiny_run(workload="yesno", batch_sizes=(2,), pictures=2, rounds=1)

    (batch,) = result.batches
    assert set(batch.programs) == {"encoder", "prefix", "prefill"}
    assert (batch.programs["prefill"].num_calls, batch.programs["prefill"].num_rows) == (1, 2)
    assert batch.stages_ms["step"] == 0
    own = " ".join([BenchJob(spec=CaptionerSpec()).question] * 2)
    longer = tiny_run(workload="yesno", batch_sizes=(1,), pictures=1, rounds=1, question=own)
    assert longer.question == own
    assert longer.prompt_tokens > result.prompt_tokens


@pytest.mark.parametrize("operators", ["auto", "aten"])
def test_int8_weights_count_one_byte_unless_they_are_widened(operators: Any, captions: BenchResult) -> None:
    spec = CaptionerSpec(context=128, precision="int8", operators=operators)
    is_widened = not open_backend("cpu").computes_in("int8", torch.float32, wanted=operators)
    job = BenchJob(spec=spec, random="tiny", workload="caption", batch_sizes=(1,), pictures=1, rounds=1)

    rounded = run_bench(job)

    assert (rounded.precision, captions.precision) == ("int8", "float")
    assert "int8 and float32" in format_table(rounded)
    moved = [one.batches[0].programs["step"] for one in (rounded, captions)]
    num_bytes = [step.gbytes_per_s * step.ms for step in moved]
    assert num_bytes[0] == pytest.approx(num_bytes[1]) if is_widened else num_bytes[0] < 0.5 * num_bytes[1]


def test_table_json_and_plot_are_made_of_one_result(tmp_path: Path) -> None:
    result = tiny_run(random=None, workload="caption", batch_sizes=(2,), rounds=1)

    for name in ("plot.png", "plot.svg"):
        check_plot(str(tmp_path / name))
        write_plot(result, str(tmp_path / name))

    assert result.model == "embedded"
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["model"] == "embedded"
    assert set(plain["batches"][0]) == {
        *("batch_size", "pictures_per_s", "pictures_per_s_rounds", "tokens_per_s", "latency_p50_ms", "latency_p95_ms"),
        *("stages_ms", "programs", "bounds", "bound_by", "busy_cpus", "warm_up_s", "num_warm_up_pictures"),
    }
    assert "embedded" in format_table(result)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def test_rates_are_medians_and_shares_follow_the_fullest_calls() -> None:
    # Steps with two rows take 1 s for 0.5e9 bytes: half of the ceiling. The call with one row does not count.
    calls = (
        *[Call("step", 2, 1.0, Work(flops=10**6, bytes=5 * 10**8))] * 3,
        Call("step", 1, 9.0, Work(flops=10**6, bytes=5 * 10**8)),
    )
    rounds = [
        Round(wall_s=wall_s, cpu_s=10.0, read_s=1.0, num_pictures=3, num_tokens=30, latencies_ms=(1, 2, 3), calls=calls)
        for wall_s in (15.0, 20.0, 30.0)
    ]

    batch = summarise(
        rounds,
        batch_size=2,
        ceilings=Ceilings(bytes_per_s=1e9, decoder_flops_per_s=1e9, encoder_flops_per_s=2e9),
        warm_up_s=0.0,
    )

    assert (batch.pictures_per_s, batch.tokens_per_s) == pytest.approx((0.15, 1.5))
    assert batch.programs["step"].bandwidth_share == pytest.approx(0.5)
    assert batch.programs["step"].num_calls == 9
    assert batch.stages_ms["step"] == pytest.approx(4000)
    assert batch.stages_ms["rest"] == pytest.approx((20 - 1 - 12) / 3 * 1e3)
    assert batch.bounds["memory"] == pytest.approx(2 / 20)
    assert batch.bound_by == "overhead"
    assert batch.busy_cpus == pytest.approx(0.5)
    assert (batch.latency_p50_ms, batch.latency_p95_ms) == (2, 3)


def test_the_command_prints_json_and_writes_the_same_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "result.json"
    flags = ["--random", "tiny", "--batch-sizes", "1", "--pictures", "1", "--rounds", "1", "--context", "128"]

    code = main(["bench", *flags, "--json", "--out", str(place), "--quiet"])

    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(place.read_text(encoding="utf-8"))
    assert json.loads(out)["workload"] == "yesno"
