"""The benchmark of ranks: its output, and its cost model."""

import json
from pathlib import Path

import pytest

from llama_adapter.app.models.random_model import decoder_config, parse_size
from scripts.bench_parallel import H100, Machine, link_bytes, main, num_weights, step


@pytest.mark.slow
def test_a_quick_run_measures_whole_and_split_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, because six new ones would import torch for most of the time.
    monkeypatch.setattr("scripts.bench_parallel.in_fresh_process", lambda work, *given: work(*given))
    main(["--quick", "--out", str(tmp_path)])

    parts = json.loads((tmp_path / "parallel.json").read_text(encoding="utf-8"))
    steps, memory = parts["steps"]["rows"], parts["memory"]["rows"]
    for rows in (steps, memory):
        assert [(row["ranks"], row["is_split"]) for row in rows] == [(1, False), (2, False), (2, True)]
    assert memory[1]["share_mib"] == memory[2]["share_mib"] < 0.55 * memory[0]["share_mib"]
    assert [len(row["peaks_mib"]) for row in memory] == [1, 2, 2]
    assert steps[0]["batches"]["1"]["decode_collectives"] == 0.0
    assert 0 < steps[1]["batches"]["5"]["decode_collectives"] < 1
    assert "| 2 | split |" in (tmp_path / "parallel.md").read_text(encoding="utf-8")


def test_the_weights_of_a_step_are_those_of_the_model() -> None:
    llama_7b = decoder_config(parse_size("7B"))
    assert num_weights(llama_7b) == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096


def test_ranks_send_sums_and_logits() -> None:
    config = decoder_config(parse_size("64x2x4x128"))
    # Five sums of 3 rows with 64 half-precision numbers, which a ring of 4 passes 1.5 times, and 3/4 of the logits.
    assert link_bytes(config, ranks=4, rows=3) == 5 * 1.5 * 3 * 64 * 2 + 0.75 * 3 * 32000 * 4
    assert link_bytes(config, ranks=1, rows=3) == 0


def test_a_step_is_bound_by_memory_and_latency() -> None:
    config = decoder_config(parse_size("65B"))
    alone = step(config, H100, ranks=1, rows=1, latency_s=1.0)
    assert alone.collectives == 0
    assert alone.total == pytest.approx(num_weights(config) * 2 / 3.35e12)
    wide = Machine(name="links without a limit", memory=H100.memory, link=float("inf"))
    eight = step(config, wide, ranks=8, rows=1, latency_s=10e-6)
    assert eight.weights == pytest.approx(alone.weights / 8)
    assert eight.collectives == pytest.approx(163 * 10e-6)
