"""Jobs from one picture to many, and exact and fast reading: rates, memory, differences in pixels and captions."""

import dataclasses
import io
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from llama_adapter.app.captioning.captioner import Answer, Captioner, work_items
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.vision.formats import Reading
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.common import in_turn, medians, process_mib, sample_files
from scripts.photographs import photograph

SIZES = {1: (1152, 864), 12: (4000, 3000)}  # width and height, by megapixels
READINGS: tuple[Reading, ...] = ("exact", "fast")
_MB_PER_MIB = 2**20 / 1e6
_SAMPLE_SIDE = 1600  # pixels, of enlarged samples


def measure_folders(parts: Parts, *, sizes: Sequence[int], rounds: int, least_pictures: int) -> list[dict[str, Any]]:
    """Run caption jobs of these sizes in turn over repeated samples, after a small warm-up job.

    Jobs below `least_pictures` are repeated. Rates and times are medians. Memory is that of the process after the first
    round, in which sizes increase.
    """
    captioner = Captioner(parts)
    _answer(captioner, pictures=parts.runner.config.num_slots)
    found = in_turn(
        sorted(sizes), lambda size: _measure(captioner, size, repeats=max(1, least_pictures // size)), rounds=rounds
    )
    return [
        {
            **medians(found[size]),
            "pictures": size,
            "pictures_per_s_rounds": [one["pictures_per_s"] for one in found[size]],
            "resident_mb": found[size][0]["resident_mb"],
            "peak_mb": found[size][0]["peak_mb"],
        }
        for size in sizes
    ]


def _measure(captioner: Captioner, size: int, *, repeats: int) -> dict[str, float]:
    """Rate, processor time per picture, and memory of this process."""
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        _answer(captioner, pictures=size)
    return {
        "pictures_per_s": size * repeats / (time.perf_counter() - started),
        "cpu_ms": (time.process_time() - cpu_started) * 1e3 / (size * repeats),
        "resident_mb": process_mib(os.getpid()) * _MB_PER_MIB,
        "peak_mb": process_mib(os.getpid(), "VmHWM") * _MB_PER_MIB,
    }


def _answer(captioner: Captioner, *, pictures: int) -> None:
    """Run a job as the command line does: drop answers as they arrive."""
    chosen = list(map(str, sample_files(pictures)))
    items = work_items(chosen, None, default_prompt=captioner.info.default_prompt)
    answered = sum(isinstance(event, Answer) for event in captioner.run(items, sampling=SamplingParams()))
    if answered != pictures:
        raise RuntimeError(f"{pictures} pictures got {answered} answers")


def measure_reading(*, megapixels: int, rounds: int) -> dict[str, Any]:
    """Read a photograph-like picture both ways, in turn. Differences are in levels of 0 to 255."""
    data = _jpeg(photograph(*SIZES[megapixels], seed=0))

    def timed(reading: Reading) -> float:
        started = time.perf_counter()
        read(data, reading)
        return time.perf_counter() - started

    pixels = {reading: read(data, reading) for reading in READINGS}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # like Pillow, because jobs read several pictures in parallel
    seconds = in_turn(READINGS, timed, rounds=4 * rounds)
    torch.set_num_threads(num_threads)
    difference = np.abs(pixels["fast"].astype(int) - pixels["exact"])
    return {
        "megapixels": megapixels,
        "pictures_per_s": {reading: 1 / statistics.median(taken) for reading, taken in seconds.items()},
        "largest_difference": int(difference.max()),
        "mean_difference": float(difference.mean()),
    }


def measure_change(parts: Parts, files: Sequence[Path]) -> dict[str, Any]:
    """Compare captions and visual queries of enlarged samples between fast and exact reading."""
    side = (_SAMPLE_SIDE, _SAMPLE_SIDE)
    pictures = [_jpeg(Image.open(file).convert("RGB").resize(side, Image.Resampling.BICUBIC)) for file in files]
    queries = {
        reading: torch.as_tensor(parts.vision.encode(np.stack([read(data, reading) for data in pictures]))).float()
        for reading in READINGS
    }
    texts = [_captions(parts, pictures, reading) for reading in READINGS]
    difference = (queries["fast"] - queries["exact"]).square().mean().sqrt() / queries["exact"].square().mean().sqrt()
    return {
        "pictures": len(pictures),
        "same_captions": sum(one == other for one, other in zip(*texts, strict=True)),
        "visual_query_difference": float(difference),
    }


def read(data: bytes, reading: Reading) -> np.ndarray:
    """Pixels (224, 224, 3), read as the captioner reads a file."""
    return preprocess(load_picture(data, least_side=448 if reading == "fast" else None).image, reading=reading)


def _captions(parts: Parts, pictures: list[bytes], reading: Reading) -> list[str]:
    reader = dataclasses.replace(parts, spec=dataclasses.replace(parts.spec, reading=reading))
    return [answer.text for answer in Captioner(reader).generate(pictures)]


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()
