"""How long the device waits for pictures: a job's stages, with pictures of several sizes and ways to read them."""

import io
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.reading.isolated import IsolatedReader
from llama_adapter.app.reading.reader import PictureReader, Reader
from llama_adapter.app.tasks.answers import Answer
from llama_adapter.llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingFigures:
    """Medians over rounds of one way to read one kind of picture."""

    pictures: str
    reader: str
    pictures_per_s: float
    waited: float  # share of the wall time in which the device waited for pictures
    rounds: list[float]  # pictures a second


def write_photographs(folder: Path, count: int, *, megapixels: float, seed: int = 1) -> list[Path]:
    """JPEG files with the detail of photographs: smooth noise of many scales, quality 90."""
    folder.mkdir(parents=True, exist_ok=True)
    width = round((megapixels * 1e6 * 4 / 3) ** 0.5)
    size = width, round(width * 3 / 4)
    paths = []
    for index in range(count):
        rng = np.random.default_rng([815, seed, index])
        canvas = np.zeros((size[1], size[0], 3), np.float32)
        for scale in (4, 16, 64, 256):
            small = rng.integers(0, 256, (3 * scale, 4 * scale, 3), dtype=np.uint8)
            canvas += np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC), np.float32) / 4
        data = io.BytesIO()
        Image.fromarray(canvas.clip(0, 255).astype(np.uint8)).save(data, "JPEG", quality=90)
        path = folder / f"{index:06d}.jpg"
        path.write_bytes(data.getvalue())
        paths.append(path)
    return paths


def measure_waiting(captioner: Captioner, kinds: dict[str, Sequence[Path]], *, rounds: int) -> list[WaitingFigures]:
    """Each kind of picture by each reader, in turn. The answers are captions."""
    readers: dict[str, Reader] = {
        "thread": PictureReader(captioner.spec, size=captioner.image_size),
        "process": IsolatedReader(captioner.spec, size=captioner.image_size, timeout_s=60.0),
    }
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with closing(readers["thread"]), closing(readers["process"]):
        for number in range(rounds + 1):
            for kind, paths in kinds.items():
                for name, reader in readers.items():
                    once = _run(captioner, paths, reader)
                    if number:  # the first round warms up
                        taken.setdefault((kind, name), []).append(once)
    return [
        WaitingFigures(
            pictures=kind,
            reader=name,
            pictures_per_s=median(rate for rate, _ in each),
            waited=median(waited for _, waited in each),
            rounds=[rate for rate, _ in each],
        )
        for (kind, name), each in taken.items()
    ]


def _run(captioner: Captioner, paths: Sequence[Path], reader: Reader) -> tuple[float, float]:
    """Pictures a second, and the share of the time that was spent waiting for them."""
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
