"""Groups of ranks: how they start, what they refuse, and how they end after a failure of a rank."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import llama_adapter.app.models.parallel.group as group_module
from llama_adapter import Captioner
from llama_adapter.app.captioning.captioner import RawPrompt
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.runtime.errors import UsageError
from tests.app.golden import case, model_options, picture
from tests.app.models.parallel.processes import children, ranks_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SAMPLES = sorted((ROOT / "assets" / "pictures").glob("*.png"))[:6]
FIRST = "a small yellow moon above a small green cross"  # what the embedded model says of the first


def test_golden_checkpoints_answer_as_the_reference_and_a_rank_that_hangs_is_named() -> None:
    wanted = case("lora_b3_equal")
    options = model_options(wanted["adapter"], llama_type="TINY-2SHARD")
    with Captioner.load(**options, tensor_parallel=4, parallel_timeout=10) as captioner:
        pictures = [picture(image) for image in wanted["images"]]
        prompt = RawPrompt(wanted["prompts"][0]["text"])
        answers = captioner.generate(pictures, prompt, max_new_tokens=wanted["max_gen_len"])
        assert [answer.text for answer in answers] == wanted["output_text"]

        processes = children(captioner)
        os.kill(processes[1].pid, signal.SIGSTOP)
        for _ in range(2):  # at the second call the group has ended
            with pytest.raises(RankError, match=rf"^Rank 2 of 4 \(process {processes[1].pid}\) .*does not respond"):
                captioner.caption(SAMPLES[0])
        assert all(process.poll() is not None for process in processes)
    assert not dist.is_initialized()


def test_ranks_with_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "files_fingerprint", lambda model, spec: "other")
    with pytest.raises(RankError, match=r"^Rank 1 of 2 has other weights than rank 0\n"):
        Captioner.load(tensor_parallel=2)
    assert not dist.is_initialized()


def test_more_ranks_than_heads_and_wrong_combinations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(group_module, "ChildProcess")  # no rank may be started
    for options, most in ((model_options(), 4), ({}, 6)):
        with pytest.raises(UsageError, match=f"{most} ranks are the most"):
            Captioner.load(**options, tensor_parallel=1_000_000)
    with pytest.raises(ValueError, match="tensor_parallel and decoder exclude each other"):
        Captioner.load(tensor_parallel=2, decoder=str(tmp_path))


def test_torchrun_starts_a_job_of_an_int4_decoder_on_two_ranks(tmp_path: Path) -> None:
    torchrun, program = (str(Path(sys.executable).with_name(name)) for name in ("torchrun", "llama-adapter"))
    out = tmp_path / "captions.jsonl"
    command = [torchrun, "--standalone", "--nproc-per-node=2", "--no-python", program, "caption", *map(str, SAMPLES)]
    command += ["--tensor-parallel", "2", "--precision", "int4", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == len(SAMPLES)
    assert all(record["error"] is None for record in records)
    assert {record["picture"]: record["text"] for record in records}[str(SAMPLES[0])] == FIRST


def test_a_job_of_an_int8_decoder_in_bfloat16_keeps_its_records_when_a_rank_is_killed(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(200):  # all files differ, so that all are answered
        (pictures / f"{number:03d}.png").write_bytes(SAMPLES[number % 6].read_bytes() + b"%d" % number)
    out = tmp_path / "captions.jsonl"
    program = str(Path(sys.executable).with_name("llama-adapter"))
    flags = ["--tensor-parallel", "2", "--batch-size", "1", "--out", str(out)]
    flags += ["--precision", "int8", "--dtype", "bfloat16"]
    job = subprocess.Popen(
        [program, "caption", str(pictures), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not out.exists() or not out.read_text():
        assert job.poll() is None
        time.sleep(0.1)
    [rank] = ranks_of(job.pid)
    os.kill(rank, signal.SIGKILL)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 1
    assert f"error: Rank 1 of 2 (process {rank}) failed: ended by SIGKILL" in said
    lines = out.read_text().splitlines()
    assert 0 < len(lines) < 200
    assert json.loads(lines[0])["text"] == FIRST
    assert not Path(f"/proc/{rank}").exists()


def test_ranks_of_an_int4_decoder_end_when_the_first_one_is_killed() -> None:
    script = (
        "from llama_adapter import Captioner\nimport sys, time\n"
        "captioner = Captioner.load(tensor_parallel=2, precision='int4')\n"
        "print(captioner.caption(sys.argv[1]).text, flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(SAMPLES[0])]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert first.stdout is not None
    assert first.stdout.readline() == f"{FIRST}\n"
    [rank] = ranks_of(first.pid)
    first.kill()
    first.communicate()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(rank).wait(timeout=30)
