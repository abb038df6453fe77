"""Batch size `auto` is the number of rows that fit into memory; a given number is used as it is or is an error."""

import argparse
from typing import Any

import pytest
import torch

import llama_adapter.app.models.memory_fit
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.command_line.values import parse_batch_size
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.load import PlacedDecoder
from llama_adapter.llm.runners.base import Runner
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.errors import DeviceError
from tests.app.golden import model_options
from tests.app.narrow import SHORTAGES

pytestmark = pytest.mark.slow


def load(batch_size: Any = "auto") -> Captioner:
    spec = CaptionerSpec(**model_options(), batch_size=batch_size, device="cpu", dtype="float32")
    return Captioner.from_spec(spec)


def lack_memory(monkeypatch: pytest.MonkeyPatch, *, most: int) -> list[int]:
    """Make more than `most` rows run out of memory; returns the numbers that were tried."""
    tried: list[int] = []
    plain = PlacedDecoder.runner

    def narrow(self: PlacedDecoder, num_slots: int, **cache: int) -> Runner:
        tried.append(num_slots)
        if num_slots > most:
            raise SHORTAGES["torch"]()
        return plain(self, num_slots, **cache)

    monkeypatch.setattr(PlacedDecoder, "runner", narrow)
    return tried


def test_auto_leaves_a_tenth_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend(CpuBackend):
        free = 1 << 62

        def free_bytes(self) -> int | None:
            return self.free

    planned: dict[int, int] = {}
    plain = llama_adapter.app.models.memory_fit.check_memory

    def note(plan: Any, config: Any, **others: Any) -> None:
        planned[config.num_slots] = plan.total
        plain(plan, config, **others)

    monkeypatch.setattr("llama_adapter.app.models.memory_fit.check_memory", note)
    monkeypatch.setattr("llama_adapter.app.captioning.assemble.open_backend", lambda name: Backend())
    for rows in (8, 1):
        load(rows)
    Backend.free = int(planned[8] / 0.9) + 1
    assert load().batch_size == 8
    Backend.free = int(planned[8] / 0.9) - 1
    assert load().batch_size == 4
    Backend.free = planned[1]
    assert load().batch_size == 1
    Backend.free = planned[1] - 1
    with pytest.raises(DeviceError):
        load()


def test_out_of_memory_halves_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = lack_memory(monkeypatch, most=5)
    captioner = load()
    assert tried == [16, 8, 4]
    assert captioner.spec.batch_size == captioner.batch_size == 4


@pytest.mark.parametrize(("batch_size", "most", "tried"), [(8, 5, [8]), ("auto", 0, [16, 8, 4, 2, 1])])
def test_a_number_is_not_halved_and_auto_not_below_one_row(
    batch_size: Any, most: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lack_memory(monkeypatch, most=most)
    with pytest.raises(torch.OutOfMemoryError):
        load(batch_size)
    assert found == tried


def test_a_batch_size_is_a_number_or_auto() -> None:
    assert [parse_batch_size(text) for text in ("auto", " AUTO", "12")] == ["auto", "auto", 12]
    for text in ("0", "-1", "1.5", "many", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_batch_size(text)
        with pytest.raises(ValueError, match="batch_size"):
            CaptionerSpec(batch_size=text)  # type: ignore[arg-type]
