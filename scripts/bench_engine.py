"""Measures the engine around the model: batching, folders of many sizes, parts of a decode step, and reading.

Usage: python -m scripts.bench_engine [--part P ...] [--quick] [--device D] [--dtypes T ...] [--threads N ...]
                                        [--rounds N] [--out FOLDER]
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch

from llama_adapter.app.captioning.assemble import ModelLoader, assemble_parts
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import StreamedModel
from llama_adapter.app.models.number_formats import Dtype
from llama_adapter.app.models.random_model import LLAMA_SIZES, RandomLoader
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE, CaptionerSpec
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.bench import run_bench
from scripts.common import sample_files, tell
from scripts.engine_bench.batching import measure_batching
from scripts.engine_bench.pictures import SIZES, measure_change, measure_folders, measure_reading
from scripts.engine_bench.step_time import measure_mixed_step, measure_step

ModelName = Literal["embedded", "tiny", "160M", "1B"]  # all but the first with random weights
FOLDER_DTYPE = "float32"
_NUM_SAMPLES = 28  # different pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how much."""

    device: Annotated[str, "device of all models"] = "cpu"
    dtypes: Annotated[tuple[str, ...], "dtypes of the decoder"] = ("float32", "bfloat16")
    threads: Annotated[tuple[int, ...], "numbers of threads of the decoder"] = (1, 2)
    model: ModelName = "160M"
    pictures: int = 64
    num_slots: int = 16
    folders: tuple[int, ...] = (1, 10, 100, 500, 2000)
    step_rows: tuple[int, ...] = (1, 16)
    mixed_rows: tuple[int, ...] = (8, 16)
    megapixels: tuple[int, ...] = tuple(SIZES)
    rounds: Annotated[int, "rounds of every measurement"] = 3
    least_pictures: int = 100  # answered per round of a folder
    num_changed: int | None = None  # samples read in both ways; None means all


QUICK = Settings(
    dtypes=("float32",),
    threads=(1,),
    model="tiny",
    pictures=6,
    num_slots=4,
    folders=(1, 10),
    step_rows=(1, 4),
    mixed_rows=(4,),
    megapixels=(1,),
    rounds=1,
    least_pictures=1,
    num_changed=2,
)


def measure_pictures(settings: Settings) -> dict[str, Any]:
    """Folders and reading, with the embedded model."""
    started = time.perf_counter()
    with opened("embedded", dtype=FOLDER_DTYPE, device=settings.device, num_slots=DEFAULT_BATCH_SIZE) as parts:
        folders = measure_folders(
            parts, sizes=settings.folders, rounds=settings.rounds, least_pictures=settings.least_pictures
        )
        change = measure_change(parts, sample_files()[: settings.num_changed])
    reading = [measure_reading(megapixels=size, rounds=settings.rounds) for size in settings.megapixels]
    tell(", ".join(f"{row['pictures']} pictures: {row['pictures_per_s']:.1f}/s" for row in folders))
    return {
        "folder_dtype": FOLDER_DTYPE,
        "folder_slots": DEFAULT_BATCH_SIZE,
        "folders": folders,
        "reading": reading,
        "reading_change": change,
        "seconds": time.perf_counter() - started,
    }


def measure_decoders(settings: Settings) -> dict[str, Any]:
    """Batching and steps of every decoder, type and number of threads, and the device they ran on."""
    started = time.perf_counter()
    rows: dict[str, list[dict[str, Any]]] = {"batching": [], "steps": [], "mixed_steps": []}
    about: dict[str, str] = {}
    models: list[tuple[ModelName, str]] = [(settings.model, dtype) for dtype in settings.dtypes]
    for name, dtype in [*models, ("embedded", settings.dtypes[0])]:
        with opened(name, dtype=dtype, device=settings.device, num_slots=settings.num_slots) as parts:
            about = {"device": parts.info.device, "operators": parts.info.operators}
            for threads in settings.threads:
                torch.set_num_threads(threads)
                of = {"model": name, "dtype": dtype, "threads": threads}
                for kind, row in _decoder_rows(parts, settings):
                    rows[kind].append(of | row)
                    tell(f"{of}: {kind} {row}")
    return {**about, "rounds": settings.rounds, **rows, "seconds": time.perf_counter() - started}


def _decoder_rows(parts: Parts, settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Figures of an open decoder, each with the table that it belongs to."""
    rule = parts.vision.pixels
    pixels_BHWC = np.stack([preprocess(load_picture(file).image, rule=rule) for file in sample_files(_NUM_SAMPLES)])
    for with_encoder in (False, True):
        amount = {"pictures": settings.pictures, "rounds": settings.rounds}
        yield "batching", measure_batching(parts, pixels_BHWC=pixels_BHWC, with_encoder=with_encoder, **amount)
    for num_rows in settings.step_rows:
        yield "steps", measure_step(parts, rows=num_rows, rounds=settings.rounds)
    for num_rows in settings.mixed_rows:
        if (mixed := measure_mixed_step(parts, rows=num_rows, rounds=settings.rounds)) is not None:
            yield "mixed_steps", mixed


@contextmanager
def opened(name: ModelName, *, dtype: str, device: str, num_slots: int) -> Iterator[Parts]:
    """The parts of a model with `num_slots` rows. A random decoder gets a random encoder of the embedded one's size."""

    def load(dtype: Dtype) -> StreamedModel:
        small = load_bundle(embedded_model()).vision_config
        query = dataclasses.replace(small.query, output_dim=LLAMA_SIZES[name].dim)
        return RandomLoader(name=name, vision=dataclasses.replace(small, query=query))(dtype)

    loader: ModelLoader | None = None if name == "embedded" else load
    parts = assemble_parts(CaptionerSpec(device=device, dtype=dtype, batch_size=num_slots), load=loader)
    try:
        yield parts
    finally:
        parts.vision.close()


def main(arguments: Sequence[str] | None = None) -> None:
    # Pictures first: a process's peak memory never falls.
    measure = {"pictures": measure_pictures, "decoders": measure_decoders}
    run_bench(__doc__, arguments, measure=measure, page="engine", full=Settings(), quick=QUICK)


if __name__ == "__main__":
    main()
