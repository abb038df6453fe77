"""Measures what is around the model: batching, folders of many sizes, where a decode step's time goes, and reading.

Usage: python -m scripts.bench_engine [--quick] [--device D] [--dtype T] [--rounds N] [--out FOLDER]

Writes engine.json and engine.md. `--quick` only shows that it runs: tiny models, few pictures, one round, and nothing
is written without `--out`.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.measuring.circumstances import circumstances, load_average
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE
from llama_adapter.runtime.devices.backend import DTYPES
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.engine_bench.batching import measure_batching
from scripts.engine_bench.folder import measure_folders
from scripts.engine_bench.models import ModelName, opened
from scripts.engine_bench.page import as_markdown
from scripts.engine_bench.reading import SIZES, measure_change, measure_reading
from scripts.engine_bench.step_time import measure_step

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER_DTYPE = "float32"
_NUM_SAMPLES = 28  # pictures that are told apart; more are these again


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is measured, and how much of it."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of the decoder beside the embedded model
    model: ModelName = "160M"
    pictures: int = 64
    num_slots: int = 16
    folders: tuple[int, ...] = (1, 10, 100, 500, 2000)
    step_rows: tuple[int, ...] = (1, 16)
    megapixels: tuple[int, ...] = tuple(SIZES)
    rounds: int = 3


QUICK = Settings(
    dtypes=("float32",),
    model="tiny",
    pictures=12,
    num_slots=4,
    folders=(1, 10),
    step_rows=(1, 4),
    megapixels=(1,),
    rounds=1,
)


def measure(settings: Settings, *, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Everything, as JSON values; `tell` gets a line for each thing that was measured."""
    load_before, started = load_average(), time.perf_counter()
    with opened("embedded", dtype=FOLDER_DTYPE, device=settings.device, num_slots=DEFAULT_BATCH_SIZE) as parts:
        # First of all, since the most memory that a process ever had never falls.
        folders = measure_folders(parts, sizes=settings.folders, rounds=settings.rounds)
        change = measure_change(parts)
    reading = [measure_reading(megapixels=size, rounds=settings.rounds) for size in settings.megapixels]
    tell(", ".join(f"{row.pictures} pictures: {row.pictures_per_s:.1f} a second" for row in folders))
    batching, steps, about = _decoders(settings, tell=tell)
    return {
        **about,
        "rounds": settings.rounds,
        "batching": batching,
        "folder_dtype": FOLDER_DTYPE,
        "folder_slots": DEFAULT_BATCH_SIZE,
        "folders": [dataclasses.asdict(row) for row in folders],
        "steps": steps,
        "reading": [dataclasses.asdict(row) for row in reading],
        "reading_change": dataclasses.asdict(change),
        "seconds": time.perf_counter() - started,
        "circumstances": circumstances(load_before=load_before),
    }


def _decoders(
    settings: Settings, *, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Batching and steps of every decoder and type, and what they were measured on."""
    batching: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    about: dict[str, str] = {}
    models: list[tuple[ModelName, str]] = [(settings.model, dtype) for dtype in settings.dtypes]
    for name, dtype in [*models, ("embedded", settings.dtypes[0])]:
        with opened(name, dtype=dtype, device=settings.device, num_slots=settings.num_slots) as parts:
            about = {"device": parts.info.device, "operators": parts.info.operators}
            of = {"model": name, "dtype": dtype}
            pixels_BHWC = _pixels(parts.vision.image_size)
            for with_encoder in (False, True):
                row = measure_batching(
                    parts,
                    pixels_BHWC=pixels_BHWC,
                    pictures=settings.pictures,
                    rounds=settings.rounds,
                    with_encoder=with_encoder,
                )
                batching.append(of | dataclasses.asdict(row))
                tell(f"{name} {dtype}: {row.speedups['static']:.2f} times static ({with_encoder=})")
            for rows in settings.step_rows:
                step = measure_step(parts, rows=rows, rounds=settings.rounds)
                steps.append(of | dataclasses.asdict(step))
                tell(f"{name} {dtype}: step of {rows} in {step.step_ms:.2f} ms, {step.overhead_share:.1%} overhead")
    return batching, steps, about


def _pixels(size: int) -> np.ndarray:
    """Sample pictures, (B, S, S, 3)."""
    files = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))[:_NUM_SAMPLES]
    return np.stack([preprocess(load_picture(file).image, size=size) for file in files])


def write(content: Mapping[str, Any], folder: Path) -> None:
    """engine.json and engine.md."""
    (folder / "engine.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "engine.md").write_text(as_markdown(content), encoding="utf-8")


def settings_from(options: argparse.Namespace) -> Settings:
    """What the flags ask for."""
    settings = dataclasses.replace(QUICK if options.quick else Settings(), device=options.device)
    if options.dtype is not None:
        settings = dataclasses.replace(settings, dtypes=(options.dtype,))
    return settings if options.rounds is None else dataclasses.replace(settings, rounds=options.rounds)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and fast: does it run?")
    parser.add_argument("--device", default=Settings().device)
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the decoder (default: float32 and bfloat16)")
    parser.add_argument("--rounds", type=_whole, help="of every measurement (default: 3, with --quick 1)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: docs, with --quick none)")
    options = parser.parse_args(arguments)
    folder = options.out or (None if options.quick else DOCS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # what is wrong with it shows before an hour of measuring
    content = measure(settings_from(options), tell=lambda line: print(line, file=sys.stderr))
    if folder is not None:
        write(content, folder)


if __name__ == "__main__":
    main()
