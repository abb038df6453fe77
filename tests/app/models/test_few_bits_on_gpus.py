"""The embedded model in 8 and 4 bits on a simulated GPU: answers and scores compared with those of widened weights."""

import functools
import math
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.errors import UsageError
from tests.fakes.cuda_graphs import install_gpus
from tests.fakes.cuda_linear import LinearOps

SAMPLES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))[::2]
MANY = 20  # rows, which is more than the kernels fuse norms for
IN_4_BITS = {"linear of 4 bits", "linear of 8 bits", "widen 4 bits", "attend"}  # the head has 8 bits
QUESTION, CHOICES = "What color is the shape?", ["red", "blue", "yellow", "green"]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> LinearOps:
    install_gpus(monkeypatch)
    ops = LinearOps()
    ops.install(monkeypatch)
    return ops


def answers(*, batch_size: int, **options: Any) -> tuple[list[str], list[list[float]]]:
    """Captions of at least ten samples, and of one for each row, and the log-probabilities of choices for a few."""
    captioner = Captioner.load(dtype="bfloat16", batch_size=batch_size, **options)
    captions = [answer.text for answer in captioner.generate((SAMPLES * 2)[: max(batch_size, 10)])]
    chosen = captioner.generate(SAMPLES[:5], QUESTION, choices=CHOICES)
    return captions, [[math.log(p) for p in (answer.choice or {}).values()] for answer in chosen]


@functools.cache
def widened(precision: str) -> tuple[list[str], list[list[float]]]:
    return answers(precision=precision, operators="aten", device="cpu", batch_size=MANY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "operators", "mode", "batch_size", "used", "tolerance"),
    [
        ("int8", "auto", "cuda_graph", 8, {"linear of 8 bits", "widen 8 bits", "attend"}, 0.2),
        ("int8", "auto", "eager", MANY, {"linear of 8 bits", "widen 8 bits", "attend"}, 0.2),
        ("int8", "w8a8", "eager", 8, {"_int_mm"}, 0.4),
        ("int4", "auto", "eager", 8, IN_4_BITS, 0.2),
        ("int4", "auto", "cuda_graph", MANY, IN_4_BITS, 0.2),
    ],
)
@pytest.mark.proves("int8 weights", "CUDA")
@pytest.mark.proves("int4 weights", "CUDA")
def test_answers_are_those_of_widened_weights(
    precision: str, operators: str, mode: str, batch_size: int, used: set[str], tolerance: float, ops: LinearOps
) -> None:
    captions, scores = answers(
        precision=precision, operators=operators, device="cuda:0", mode=mode, batch_size=batch_size
    )
    assert set(ops.calls) == used
    expected, their_scores = widened(precision)

    assert captions == expected[: len(captions)]
    for ours, theirs in zip(scores, their_scores, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


@pytest.mark.slow
def test_a_gpu_without_a_compiler_computes_with_torch_and_a_note_says_why(
    ops: LinearOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(gate_up: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr("llama_adapter.runtime.devices.triton_calls.swiglu", broken)
    captioner = Captioner.load(dtype="bfloat16", batch_size=8, device="cuda:0", precision="int8")

    assert [answer.text for answer in captioner.generate(SAMPLES[:10])] == widened("int8")[0][:10]
    assert ops.calls == {}
    fault = "torch computes in place of the Triton kernels, which cannot run here: Failed to find C compiler."
    assert fault in captioner.info.notes
    assert any(note.startswith("8-bit weights are widened to bfloat16 here") for note in captioner.info.notes)


def test_rounding_inputs_needs_8_bit_weights(ops: LinearOps) -> None:
    with pytest.raises(UsageError, match="needs 8-bit weights, and those of the model are float"):
        Captioner.load(operators="w8a8", device="cuda:0")
    with pytest.raises(ValueError, match="operators w8a8 goes with precision int8, and it is int4"):
        Captioner.load(operators="w8a8", precision="int4")
