"""The share of a job in which the device waits for pictures, by kind of picture and of reader."""

import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.reader import PictureReader, Reader
from llama_adapter.llm.engine.sampling_params import SamplingParams
from scripts.common import in_turn


def measure_waiting(captioner: Captioner, kinds: dict[str, Sequence[Path]], *, rounds: int) -> list[dict[str, Any]]:
    """Caption each kind of picture with each reader, in turn."""
    readers: dict[str, Reader] = {
        "thread": PictureReader(captioner.spec.pictures, size=captioner.image_size),
        "process": IsolatedReader(captioner.spec.pictures, size=captioner.image_size, timeout_s=60.0),
    }
    ways = list(itertools.product(kinds, readers))
    with closing(readers["thread"]), closing(readers["process"]):
        for kind, name in ways:  # warm up
            _run(captioner, kinds[kind], readers[name])
        taken = in_turn(ways, lambda way: _run(captioner, kinds[way[0]], readers[way[1]]), rounds=rounds)
    return [
        {
            "pictures": kind,
            "reader": name,
            "pictures_per_s": median(rate for rate, _ in each),
            "waited": median(waited for _, waited in each),  # share of the wall time without a picture
            "rounds": [rate for rate, _ in each],
        }
        for (kind, name), each in taken.items()
    ]


def _run(captioner: Captioner, paths: Sequence[Path], reader: Reader) -> tuple[float, float]:
    """Pictures per second, and the share of the time spent waiting for pictures."""
    prompt = captioner.info.default_prompt
    items = (
        WorkItem(picture=path, label=path.name, questions=(WorkQuestion(index=index, prompt=prompt),))
        for index, path in enumerate(paths)
    )
    clock = StageClock()
    started = time.perf_counter()
    events = captioner.run(items, sampling=SamplingParams(), clock=clock, reader=reader)
    answers = [event for event in events if isinstance(event, Answer)]
    wall_s = time.perf_counter() - started
    assert len(answers) == len(paths)
    assert all(answer.error is None for answer in answers)
    return len(paths) / wall_s, clock.seconds["read"] / wall_s
