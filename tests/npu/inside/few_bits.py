"""Toy decoders and the embedded model in 8 and 4 bits on the fake NPU, compared with widened weights on the CPU."""

import dataclasses
import functools
import math
from typing import Any

import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.errors import DeviceError
from tests.npu.inside import decoder
from tests.npu.inside.host_ops import HostOps

# The 80 inputs of the layers `down` are no whole groups of 4-bit weights.
CONFIG = decoder.FUSED
DTYPES = ("float16", "bfloat16")
WAYS = (("int8", "auto"), ("int8", "w8a8"), ("int4", "auto"))
QUESTION, CHOICES = "What color is the shape?", ["red", "blue", "yellow", "green"]


@functools.cache
def widened(precision: str, dtype: str) -> dict[str, Any]:
    return decoder.results(CONFIG, CpuBackend(), dtype=getattr(torch, dtype), precision=precision, wanted="aten")


@functools.cache
def widened_answers(precision: str) -> dict[str, Any]:
    return answers("cpu", dtype="float32", precision=precision, operators="aten")


def compute_expected() -> None:
    for precision in ("int8", "int4"):
        for dtype in DTYPES:
            widened(precision, dtype)
        widened_answers(precision)


def answers(device: str, *, dtype: str, **options: Any) -> dict[str, Any]:
    """Captions of a few samples, and the log-probabilities of choices for fewer."""
    captioner = Captioner.load(device=device, dtype=dtype, batch_size=8, **options)
    pictures = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))[:4]
    chosen = captioner.generate(pictures[:2], QUESTION, choices=CHOICES)
    return {
        "captions": [answer.text for answer in captioner.generate(pictures, max_new_tokens=8)],
        "scores": [[math.log(p) for p in (answer.choice or {}).values()] for answer in chosen],
        "notes": list(captioner.info.notes),
    }


def report(backend: Any) -> dict[str, Any]:
    """What the chip allows, and the chosen operators, for each precision and wanted operators."""
    found = {}
    for precision, wanted in WAYS:
        entry: dict[str, Any] = {"refusal": backend.refusal(precision, wanted=wanted)}
        entry["choices"] = {
            name: dataclasses.asdict(backend.choose_linear(precision, getattr(torch, name), wanted=wanted))
            for name in (*DTYPES, "float32")
        }
        found[f"{precision} {wanted}"] = entry
    return found


def runs(backend: Any) -> dict[str, Any]:
    """Results of toy decoders in every 16-bit type and of the embedded model, or the error if the chip refuses."""
    found = {}
    for precision, wanted in WAYS:
        names = [] if backend.refusal(precision, wanted=wanted) else backend.family.dtypes
        toys = [_toy(backend, precision, wanted, name) for name in names if name in DTYPES]
        mode = HostOps()
        try:
            with mode:
                given: Any = answers("npu:0", dtype="float16", precision=precision, operators=wanted)
        except DeviceError as error:
            given = {"error": error.message, "hint": error.hint}
        outcome = {"given": given, "expected": widened_answers(precision), "calls": mode.calls}
        found[f"{precision} {wanted}"] = {"toys": toys, "embedded": outcome}
    return found


def _toy(backend: Any, precision: str, wanted: str, name: str) -> dict[str, Any]:
    mode = HostOps()
    with mode:
        given = decoder.results(CONFIG, backend, dtype=getattr(torch, name), precision=precision, wanted=wanted)
    return {"given": given, "expected": widened(precision, name), "calls": mode.calls, "dtype": name}
