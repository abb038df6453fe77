"""Measures exported decoders and encoders, and writes docs/graphs.json and docs/graphs.md.

Usage: python -m scripts.bench_graphs [--part PART] [--sizes 160M 1B] [--rounds 3]

Parts measured earlier stay unless they are measured again. `exports` writes decoders with random weights in every
precision. `processes` runs the caption command with and without torch. `one_thread` and `two_threads` measure all
programs in alternation. `formats` compares the logits of each format with torch's logits; it needs MindSpore.
`encoders` exports an encoder of full size.
"""

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import torch

from llama_adapter.app.models.graph_export.decoder import DecoderFormat, DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.exported.mindir_program import open_mindir_program
from llama_adapter.llm.exported.onnx_program import OnnxProgram
from llama_adapter.llm.exported.parity import compare
from llama_adapter.llm.exported.program import DecoderProgram
from llama_adapter.llm.exported.weights_file import ExportPrecision
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.graphs.card import GraphDtype
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.mindir_runtime import MindirRuntime
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.export import compare as compare_encoders
from llama_adapter.vision.export import export_onnx
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.bench import run_bench
from scripts.common import ROOT, in_turn, sample_files, tell
from scripts.peers.exported import ONNXRUNTIME_PACKAGES
from scripts.peers.graphs import FOLDER
from scripts.peers.rounds import Plan, run_rounds
from scripts.peers.table import chosen_engines, engine_names
from scripts.peers.weights import encoder_sizes, encoder_state

ENGINES = tuple(
    engine.name for engine in chosen_engines(engine_names(), "decode") if engine.program in ("ours", "graphs")
)
ENCODER_CASES: tuple[tuple[GraphDtype, int], ...] = (("float32", 18), ("float16", 18), ("float16", 17))  # type, opset
NUM_PICTURES = 3
# These programs run in separate processes, so that only their own imports are measured. Each begins with the first one,
# and prints its figures as JSON in the last line of stderr.
_PEAK = """
import json, sys, time
def peak_mb():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e3
started = time.perf_counter()
"""
_OPEN = """
from pathlib import Path
from llama_adapter.llm.exported.card import read_card
from llama_adapter.llm.exported.onnx_program import OnnxProgram
place = Path(sys.argv[1])
OnnxProgram(read_card(place), place, threads=int(sys.argv[2]), num_slots=1)
seconds = time.perf_counter() - started
print(json.dumps({"open_s": round(seconds, 2), "open_mb": round(peak_mb())}), file=sys.stderr)
"""
_EXPORT = """
from pathlib import Path
from scripts.peers.graphs import export_random
before_mb, started = peak_mb(), time.perf_counter()
export_random(Path(sys.argv[1]), sys.argv[2])
seconds = time.perf_counter() - started
print(json.dumps({"export_s": round(seconds, 1), "export_mb": round(peak_mb() - before_mb)}), file=sys.stderr)
"""
_COMMAND = """
from llama_adapter.__main__ import main
assert main(["caption", *sys.argv[1:]]) == 0
print(json.dumps({"peak_mb": round(peak_mb()), "torch": "torch" in sys.modules}), file=sys.stderr)
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run measures."""

    sizes: Annotated[tuple[str, ...], "sizes of models with random weights"] = ("160M", "1B")
    rounds: Annotated[int, "rounds of the parts that measure processes and rates"] = 3
    engines: Annotated[tuple[str, ...], "programs to compare"] = ENGINES
    budget: Annotated[float, "seconds for the repetitions of one figure"] = 2.5
    encoder: str = "ViT-L/14"
    work: Annotated[str, "working folder"] = str(Path(".work/graphs").absolute())


def measure_exports(settings: Settings) -> dict[str, Any]:
    """Export each size and precision in a separate process, and open the graphs in another process."""
    rows: list[dict[str, Any]] = []
    for size in settings.sizes:
        with tempfile.TemporaryDirectory() as folder:
            for precision in get_args(ExportPrecision):
                place = Path(folder) / f"{FOLDER}{precision}"
                written = _child(_EXPORT, str(place), size)
                num_bytes = sum(file.stat().st_size for file in place.iterdir())
                opened = _child(_OPEN, str(place), str(os.cpu_count()))
                sizes = {"size": size, "precision": precision, "disk_mb": round(num_bytes / 1e6, 1)}
                rows.append({**sizes, **written, **opened})
                tell(str(rows[-1]))
    return {"rows": rows}


def _child(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program in a separate process. Returns its figures, and the time of the whole process as `seconds`."""
    started = time.perf_counter()
    command = [sys.executable, "-c", _PEAK + program, *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    seconds = round(time.perf_counter() - started, 2)
    reply: dict[str, Any] = json.loads(ran.stderr.splitlines()[-1])
    return {**reply, "seconds": seconds}


def measure_formats(settings: Settings) -> dict[str, Any]:
    """Differences of the embedded model's logits from torch's float32, in every format that runs here."""
    backend, spec = open_backend("cpu"), CaptionerSpec()
    model, tensors = stream_model(spec, dtype=torch.float32, is_encoded_elsewhere=True)
    config = EngineConfig(decoder=model.decoder_config, dtype=torch.float32, operators="aten")
    reference = place_decoder(config, tensors, backend=backend).runner(3)
    assert isinstance(reference, EagerRunner), "the CPU's runners are"
    formats: dict[DecoderFormat, tuple[Any, ...]] = {"onnx": get_args(ExportPrecision)}
    if importlib.util.find_spec("mindspore") is not None:
        formats["mindir"] = ("float32", "float16")
    rows: list[dict[str, Any]] = []
    for form, precisions in formats.items():
        for precision in precisions:
            with tempfile.TemporaryDirectory() as scratch:
                place = Path(scratch) / "exported"
                job = DecoderJob(out=str(place), format=form, precision=precision, encoder=False, compare=False)
                run_export_decoder(job)
                card = read_card(place)
                program: DecoderProgram
                if form == "mindir":
                    program = open_mindir_program(card, place, MindirRuntime(), num_slots=3)
                else:
                    program = OnnxProgram(card, place, threads=1, num_slots=3)
                with closing(program):
                    parity = compare(program, reference)
            rows.append({"format": form, "precision": precision, **dataclasses.asdict(parity)})
            tell(str(rows[-1]))
    return {"rows": rows}


def measure_encoders(settings: Settings) -> dict[str, Any]:
    """Export an encoder for 7B in each type: sizes, findings of the lint for ATC, and differences from torch."""
    config = encoder_sizes(settings.encoder, output_dim=4096)
    state, rule = encoder_state(config), config.clip.pixels
    pixels_BHWC = np.stack([preprocess(load_picture(file).image, rule=rule) for file in sample_files(NUM_PICTURES)])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.onnx"
        for dtype, opset in ENCODER_CASES:
            export_onnx(config, state, path, name="random encoder", dtype=dtype, opset=opset)
            graph, parity = read_graph(path), compare_encoders(path, encoder_from_state(config, state), pixels_BHWC)
            rows.append(
                {
                    "dtype": dtype,
                    "opset": opset,
                    "file_mb": round(graph.num_bytes / 1e6, 1),
                    "num_nodes": len(graph.nodes),
                    "operators": dict(graph.operators),
                    "complaints": [complaint.sentence for complaint in lint_graph(graph)],
                    "max_abs": parity.max_abs,
                    "mean_abs": parity.mean_abs,
                    "cosine_min": parity.cosine_min,
                }
            )
            tell(str(rows[-1]))
    millions = round(sum(tensor.numel() for tensor in state.values()) / 1e6, 1)
    return {"encoder": settings.encoder, "parameters_m": millions, "num_pictures": NUM_PICTURES, "rows": rows}


def measure_processes(settings: Settings) -> dict[str, Any]:
    """Run the caption command for one picture in separate processes, in turn.

    Gives seconds and peak memory per process.
    """
    with tempfile.TemporaryDirectory() as folder:
        exported = f"{folder}/embedded"
        program = [sys.executable, "-m", "llama_adapter", "export", "decoder", "--out", exported]
        subprocess.run(program, check=True, capture_output=True)
        ways: dict[str, list[str]] = {"torch": [], "exported graphs": ["--decoder", exported]}
        picture = str(sample_files()[0])
        found = in_turn(ways, lambda way: _child(_COMMAND, picture, *ways[way]), rounds=2 * settings.rounds + 1)
    rows = {
        name: {
            "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
            "peak_mb": statistics.median(run["peak_mb"] for run in runs),
            "torch": runs[0]["torch"],
        }
        for name, runs in found.items()
    }
    return {"rows": rows}


def measure_rates(settings: Settings, *, threads: int) -> dict[str, Any]:
    """Decode and prefill rates of all programs, in turn; see scripts/bench_peers.py."""
    plan = Plan(
        sections=("decode",),
        sizes=settings.sizes,
        engines=settings.engines,
        rounds=settings.rounds,
        threads=threads,
        budget=settings.budget,
        work=settings.work,
    )
    results = run_rounds(plan, tell=tell, keep=lambda results: None)
    table: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in results.rows:
        if row.part != "ceiling":
            place = row.size, row.part, row.batch
            entry = table.setdefault(place, dict(zip(("size", "part", "batch"), place, strict=True)) | {"rates": {}})
            entry["rates"][row.engine] = row.median
    missing = [{"engine": one.engine, "size": one.size, "reason": one.reason} for one in results.missing]
    return {"threads": threads, "rows": [table[place] for place in sorted(table)], "missing": missing}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write. The exit code is 2 for invalid flags."""
    run_bench(
        __doc__,
        arguments,
        page="graphs",
        packages=ONNXRUNTIME_PACKAGES,
        measure={
            "exports": measure_exports,
            "formats": measure_formats,
            "encoders": measure_encoders,
            "processes": measure_processes,
            "one_thread": lambda settings: measure_rates(settings, threads=1),
            "two_threads": lambda settings: measure_rates(settings, threads=2),
        },
        full=Settings(),
        quick=Settings(sizes=("tiny",), rounds=1, budget=0.1, encoder="vit-tiny"),
        choices={"sizes": ("tiny", "160M", "1B"), "engines": ENGINES},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
