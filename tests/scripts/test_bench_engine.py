"""The benchmark of the engine: its jobs produce the planned captions. Speed is not tested."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.engine.engine import Engine
from scripts.bench_engine import main, opened
from scripts.engine_bench.batching import POLICIES, Job, Policy, full_steps, planned_lengths, run_job, static_steps
from scripts.pages.render import read


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    with opened("tiny", dtype="float32", device="cpu", num_slots=3) as parts:
        yield parts


@pytest.mark.parametrize("number", [1, 2, 16, 64])
def test_planned_lengths_are_spread_evenly_and_repeatable(number: int) -> None:
    lengths = planned_lengths(number)

    assert len(lengths) == number
    assert lengths == planned_lengths(number)
    assert min(lengths) == 4
    assert number == 1 or max(lengths) == 64
    assert max(np.diff(sorted(lengths)), default=0) <= -(-60 // max(1, number - 1))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_the_planned_captions(parts: Parts, policy: Policy) -> None:
    lengths = (4, 9, 6, 5, 12, 4, 7)
    engine = Engine(parts.runner, eos_id=-1)
    visual_query_BQD = parts.vision.encode(np.zeros((1, *[parts.vision.pixels.image_size] * 2, 3), dtype=np.uint8))
    (prefix,) = engine.project_prefix(visual_query_BQD)
    asked: list[int] = []

    def prefixes(indices: object) -> list[object]:
        asked.extend(indices)  # type: ignore[call-overload]
        return [prefix] * len(indices)  # type: ignore[arg-type]

    made = run_job(engine, Job(lengths=lengths, prompt_ids=(1, 5, 6), prefixes=prefixes), policy=policy)  # type: ignore[arg-type]

    assert asked == list(range(7))
    assert made == ([9, 9, 9, 12, 12, 12, 7] if policy == "static" else list(lengths))
    assert engine.num_unfinished == 0


def test_decode_steps_of_static_batches_and_of_full_slots() -> None:
    assert static_steps((4, 9, 3, 12, 5, 2, 7), 3) == 8 + 11 + 6
    assert full_steps((4, 9, 3, 12, 5, 2, 7), 3) == (3 + 8 + 2 + 11 + 4 + 1 + 6) / 3


@pytest.mark.slow
def test_short_run_writes_all_figures_and_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.engine_bench.step_time._NUM_STEPS", 4)
    monkeypatch.setattr("scripts.engine_bench.batching.MOST_TOKENS", 12)

    main(["--quick", "--out", str(tmp_path)])

    content = read("engine", tmp_path)
    page = (tmp_path / "engine.md").read_text(encoding="utf-8")
    mixed = content["decoders"]["mixed_steps"]  # only for decoders that run in the kernels
    assert page.count("| tiny | float32 | ") == 4
    assert page.count("| embedded | float32 | ") == 4 + len(mixed)
    assert [row["pictures"] for row in content["pictures"]["folders"]] == [1, 10]
    for row in content["decoders"]["batching"]:
        rates, speedups = row["pictures_per_s"], row["speedups"]
        assert row["tokens"] == sum(planned_lengths(row["pictures"]))
        assert speedups["static"] == pytest.approx(rates["continuous"] / rates["static"])
        assert speedups["continuous"] == 1
    assert [(row["model"], row["rows"]) for row in mixed] == [("embedded", 4)] * len(mixed)
    for row in content["decoders"]["steps"]:
        assert row["overhead_share"] == pytest.approx((row["other_ms"] + row["host_ms"]) / row["step_ms"])
        assert min(row[f"{name}_ms"] for name in ("step", "linears", "attention", "other", "host")) >= 0
