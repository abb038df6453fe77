"""The embedded model on a GPU: what it says about all sample pictures equals what the CPU says.

With 8-bit and 4-bit weights it is compared with widened weights on the same GPU.
"""

import functools
import gc
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.problems import describe, is_out_of_memory
from tests.app.captioning.test_oom_retry import quiet, read, said
from tests.app.models.test_few_bits_on_gpus import CHOICES, QUESTION
from tests.cuda.device import DEVICE, GRAPHS, IS_GPU, loaded

# Captions and questions about all sample pictures.
ASKED = [json.loads(line) for line in (sample_pictures() / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


def answers(captioner: Captioner) -> list[tuple[str, tuple[int, ...]]]:
    """Texts and token ids."""
    pictures = [sample_pictures() / asked["picture"] for asked in ASKED]
    given = captioner.generate(pictures, [asked["question"] for asked in ASKED])
    return [(answer.text, answer.token_ids) for answer in given]


def scores(captioner: Captioner) -> list[float]:
    """The log-probability of each choice for each sample picture."""
    chosen = captioner.generate(sample_pictures(), QUESTION, choices=CHOICES)
    return [math.log(probability) for answer in chosen for probability in (answer.choice or {}).values()]


@functools.cache
def expected() -> list[tuple[str, tuple[int, ...]]]:
    return answers(loaded("cpu"))


@pytest.mark.parametrize(("mode", "operators"), [("eager", "aten"), ("eager", "auto"), (GRAPHS, "auto")])
@pytest.mark.proves("embedded model", "CUDA")
@pytest.mark.proves("float32", "CUDA")
@pytest.mark.proves("fused operators or kernels", "CUDA")
@pytest.mark.proves("graphs", "CUDA")
@pytest.mark.proves("choices by scoring", "CUDA")
def test_answers_and_scores_in_float32_are_the_cpus(mode: str, operators: str) -> None:
    captioner = loaded(mode=mode, operators=operators)

    assert answers(captioner) == expected()
    assert scores(captioner) == pytest.approx(scores(loaded("cpu")), abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.proves("bfloat16", "CUDA")
@pytest.mark.proves("float16", "CUDA")
def test_answers_in_half_types_are_those_in_float32(dtype: str) -> None:
    told = answers(loaded(dtype=dtype, mode=GRAPHS))

    differing = [(one[0], other[0]) for one, other in zip(told, expected(), strict=True) if one != other]
    assert len(ASKED) == 330
    assert differing == []


SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    {"temperature": 1.5, "top_k": 20, "seed": 8, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.proves("continuous batching", "CUDA")
@pytest.mark.proves("repetition penalty", "CUDA")
@pytest.mark.proves("streaming", "CUDA")
@pytest.mark.proves("asynchronous read-back", "CUDA")
def test_a_row_gives_the_cpus_tokens_alone_and_among_16(sampling: dict[str, Any]) -> None:
    captioners = loaded("cpu"), loaded(batch_size=1, mode=GRAPHS), loaded(mode=GRAPHS)
    cpus, alone, together = (read(one.stream(sample_pictures(), max_new_tokens=24, **sampling)) for one in captioners)

    for index, answer in cpus.items():
        assert alone[index].token_ids == together[index].token_ids == answer.token_ids
    assert len(cpus) == 32


@pytest.mark.proves("text without a picture", "CUDA")
def test_a_text_without_a_picture_is_continued_as_on_the_cpu() -> None:
    prompts = ["Generate caption of this image", QUESTION]
    cpus, ours = (one.generate_text(prompts, text_prefix="zeros") for one in (loaded("cpu"), loaded(mode=GRAPHS)))

    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in cpus]


@pytest.mark.parametrize("mode", ["eager", GRAPHS])
@pytest.mark.proves("traces", "CUDA")
def test_a_trace_has_the_kernels_of_the_gpu(mode: str, tmp_path: Path) -> None:
    captioner = loaded(mode=mode)
    with captioner.tracing(tmp_path):
        captioner.generate(sample_pictures(), max_new_tokens=2)

    (file,) = tmp_path.iterdir()
    found = {event.get("cat") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"user_annotation", *(["cpu_op", "kernel"] if IS_GPU else [])} <= found  # a CPU computes by C kernels


@pytest.mark.parametrize(("encoding", "answering"), [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_what_one_device_encodes_another_one_answers(encoding: str, answering: str, run: Any, tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes"
    flags = ["--device", encoding, "--dtype", "float32", "--reader", "thread", "--out", str(prefixes)]
    assert run("encode", str(sample_pictures()), flags).code == 0
    options: dict[str, Any] = {"device": answering, "dtype": "float32", "vision": "prefixes", "encoder": prefixes}
    with Captioner.load(**options) as captioner:
        told = {answer.picture: answer.token_ids for answer in captioner.generate(prefixes)}

    assert told == {answer.picture: answer.token_ids for answer in loaded("cpu").generate(sample_pictures())}


@functools.cache
def widened(precision: str) -> tuple[list[tuple[str, tuple[int, ...]]], list[float]]:
    captioner = loaded(dtype="bfloat16", precision=precision, operators="aten")
    return answers(captioner), scores(captioner)


# The limits are on log-probabilities, which bfloat16 rounds coarsely.
@pytest.mark.parametrize(
    ("precision", "operators", "layer", "limit"),
    [
        ("int8", "auto", "PackedLinear", 0.2),
        ("int8", "w8a8", "RoundedLinear", 0.4),
        ("int4", "auto", "PackedLinear", 0.4),
    ],
)
@pytest.mark.parametrize("mode", ["eager", GRAPHS])
@pytest.mark.proves("int8 weights", "CUDA")
@pytest.mark.proves("int4 weights", "CUDA")
def test_answers_are_those_of_widened_weights(
    precision: str, operators: str, layer: str, limit: float, mode: str
) -> None:
    captioner = loaded(dtype="bfloat16", precision=precision, operators=operators, mode=mode)
    if IS_GPU:
        decoder: Any = captioner._engine._runner._decoder  # type: ignore[attr-defined]
        assert any(type(module).__name__ == layer for module in decoder.modules())

    expected, their_scores = widened(precision)
    pairs = zip(answers(captioner), expected, strict=True)
    differing = [(ours[0], theirs[0]) for ours, theirs in pairs if ours != theirs]
    largest = max(abs(one - other) for one, other in zip(scores(captioner), their_scores, strict=True))
    print(f"{precision}, {operators}, {mode}: scores differ by at most {largest:.4f}, {differing=}")
    assert largest < limit
    assert differing == []


# A GPU whose memory does not suffice: fewer rows at once give the same answers, and the error is explained

needs_gpu = pytest.mark.skipif(not IS_GPU, reason="no CUDA device here")

PROMPT = " ".join(60 * ["What color is the shape?"])  # so long that a prefill needs more memory than the encoder


@needs_gpu
@pytest.mark.proves("fewer rows when memory is short", "CUDA")
def test_a_job_that_runs_out_of_memory_goes_on_with_fewer_rows() -> None:
    loaded.cache_clear()  # other models could leave holes in torch's memory
    gc.collect()
    captioner = loaded(operators="aten", mode="eager")  # graphs would hold their memory between the runs
    notes = quiet(captioner)
    expected = said(read(captioner.stream(sample_pictures(), PROMPT, max_new_tokens=4)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    read(captioner.stream(sample_pictures(), PROMPT, max_new_tokens=4))
    needed = torch.cuda.max_memory_allocated() - used
    assert notes == []

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved + 0.6 * needed) / total)
    try:
        told = said(read(captioner.stream(sample_pictures(), PROMPT, max_new_tokens=4)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        loaded.cache_clear()  # this one has fewer rows now
    print(f"16 rows need {needed / 1e6:.0f} MB; with 60 % of it: {notes}")
    assert told == expected
    assert "out of memory with 16 rows: going on with 8" in notes


@needs_gpu
def test_the_devices_own_error_is_explained() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 45, device=DEVICE)

    problem = describe(caught.value)
    assert is_out_of_memory(caught.value)
    assert problem.sentence.startswith("The memory is not enough: CUDA out of memory. Tried to allocate")
    assert "--batch-size" in problem.hint
