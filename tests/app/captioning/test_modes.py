"""The mode that a captioner gets by default, on a simulated GPU, on several of them and on the CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.compat.model_runner import ModelRunner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.online.loading import load_warm
from llama_adapter.app.records.manifest import read_manifest
from llama_adapter.runtime import devices
from llama_adapter.runtime.devices.cuda import CUDA
from llama_adapter.runtime.errors import DeviceError
from tests.app.command import Run
from tests.fakes.cuda_graphs import FakeCuda, HostCuda

SAMPLES = sorted(str(path) for path in sample_pictures().glob("*.png"))[:3]
ON_GPU: dict[str, Any] = {"device": "cuda:0", "dtype": "float32"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    monkeypatch.setattr(devices, "ACCELERATORS", (replace(CUDA, count=lambda: 1, open=lambda index: HostCuda()),))
    return fake


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


def test_a_model_runner_without_exe_mode_tells_the_mode_of_its_model() -> None:
    runner = ModelRunner({}, device="cpu")
    runner.init_model()
    assert runner.execute_mode == "eager"
    runner.close()


def test_the_mode_of_an_exported_decoder_is_that_of_its_export() -> None:
    assert CaptionerSpec(decoder="folder").mode == "auto"
    assert CaptionerSpec(decoder="folder", mode="eager").mode == "eager"
    with pytest.raises(ValueError, match="are those of its export"):
        CaptionerSpec(decoder="folder", mode="cuda_graph")


def test_several_ranks_take_no_graph_mode() -> None:
    assert CaptionerSpec(tensor_parallel=2).mode == "auto"
    assert CaptionerSpec(tensor_parallel=2, mode="eager").mode == "eager"
    with pytest.raises(ValueError, match="goes with mode eager, and it is cuda_graph"):
        CaptionerSpec(tensor_parallel=2, mode="cuda_graph")


def test_a_cpu_refuses_graph_modes() -> None:
    with pytest.raises(DeviceError, match="has no mode `graph`"):
        Captioner.load(device="cpu", mode="graph")
