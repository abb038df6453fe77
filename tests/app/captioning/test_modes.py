"""The mode that a captioner gets by default, on a simulated GPU, on several of them and on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.jobs.records.manifest import read_manifest
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.service import load_warm
from llama_adapter.runtime.errors import DeviceError
from tests.app.command import Run
from tests.fakes.cuda_graphs import FakeCuda, install_gpus

SAMPLES = sorted(str(path) for path in sample_pictures().glob("*.png"))[:3]
ON_GPU: dict[str, Any] = {"device": "cuda:0", "dtype": "float32"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install_gpus(monkeypatch)


def test_steps_of_a_gpu_are_recorded_unless_eager_is_asked_for(cuda: FakeCuda) -> None:
    told = []
    for options, mode in (({}, "cuda_graph"), ({"mode": "graph"}, "cuda_graph"), ({"mode": "eager"}, "eager")):
        before = cuda.num_captures()
        with Captioner.load(**ON_GPU, **options) as captioner:
            told.append([answer.text for answer in captioner.generate(SAMPLES)])
            assert captioner.info.mode == captioner.spec.mode == mode
        assert (cuda.num_captures() > before) == (mode == "cuda_graph")
    with Captioner.load(device="cpu", dtype="float32") as captioner:
        told.append([answer.text for answer in captioner.generate(SAMPLES)])
        assert captioner.info.mode == captioner.spec.mode == "eager"
    assert told == [told[0]] * 4


def test_a_job_records_only_the_steps_that_it_takes(cuda: FakeCuda, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "captions.jsonl"
    flags = ["--device", "cuda:0", "--dtype", "float32", "--batch-size", "16", "--out", str(out)]
    ran = run("caption", SAMPLES, flags, "--max-new-tokens", "4")
    (manifest,) = read_manifest(out)

    assert ran.code == 0
    assert "warm-up" not in ran.err
    assert manifest.spec["mode"] == "cuda_graph"
    assert 1 <= cuda.num_captures() <= len(SAMPLES)


def test_a_service_records_all_steps_before_its_first_request(cuda: FakeCuda) -> None:
    notes: list[str] = []
    with load_warm(CaptionerSpec(**ON_GPU, batch_size=2), tell=notes.append) as captioner:
        captured = cuda.num_captures()
        captioner.caption(SAMPLES[0])
        assert captured > 0
        assert cuda.num_captures() - captured <= 1  # the prompt, whose shape occurs for the second time
    assert notes[-1].startswith("warm-up: ")


@pytest.mark.parametrize("mode", ["graph", "ge_graph", "acl_graph", "npugraph_ex", "cuda_graph"])
def test_a_graph_mode_runs_eager_on_a_cpu_with_a_warning(mode: str) -> None:
    with (
        pytest.warns(UserWarning, match=f"Steps run eager: mode `{mode}` cannot be used on cpu"),
        Captioner.load(device="cpu", mode=mode) as captioner,
    ):
        assert captioner.info.mode == captioner.spec.mode == "eager"


@pytest.mark.parametrize(("mode", "strict"), [("graph", True), ("ge_graph", True), ("bananas", False)])
def test_a_cpu_refuses_graph_modes_if_it_is_strict_and_unknown_modes_always(mode: str, strict: bool) -> None:
    with pytest.raises(DeviceError, match=f"has no mode `{mode}`"):
        Captioner.load(device="cpu", mode=mode, strict=strict)


def test_a_command_tells_that_a_graph_mode_runs_eager(run: Run) -> None:
    flags = ["--device", "cpu", "--max-new-tokens", "4"]
    plain = run("caption", SAMPLES[0], flags, "--mode", "eager")
    ran = run("caption", SAMPLES[0], flags, "--mode", "ge_graph")
    assert (ran.code, ran.records[0]["text"]) == (0, plain.records[0]["text"])
    assert "steps run eager: cpu has no mode `ge_graph`" in ran.err
    assert "steps run eager" not in plain.err

    strict = run("caption", SAMPLES[0], flags, "--mode", "ge_graph", "--strict")
    assert strict.code == 2
    assert "error: cpu has no mode `ge_graph`" in strict.err
