"""A child process of the benchmark. It measures the engine of a task.

The task is read from stdin and the reply is written to stdout, both pickled. Output of libraries goes to stderr.
Failures are also sent as replies.
"""

import gc
import hashlib
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llama_adapter.app.measuring.report import circumstances, load_average
from llama_adapter.app.measuring.roofline import decoder_shapes, encoder_shapes
from llama_adapter.app.models.random_model import WiderTokenizer
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.runtime.devices import DTYPES, open_backend
from llama_adapter.runtime.schemes import Precision
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.common import sample_files
from scripts.peers import exported, graphs, huggingface, llama_cpp
from scripts.peers.files import end_id, make_file
from scripts.peers.measuring import Encode, MemoryReader, measure_decoder, measure_vision
from scripts.peers.ours import OurDecoder, OurJob, open_parts
from scripts.peers.packages import MissingPackage, versions
from scripts.peers.reference import ReferenceJob
from scripts.peers.sizes import ENCODERS, JOB_ENDS
from scripts.peers.task import Figure, Reply, Task
from scripts.peers.weights import (
    bare_tower,
    decoder_sizes,
    decoder_state,
    encoder_sizes,
    encoder_state,
    give_all_tokens,
)

PRECISIONS: tuple[tuple[str, str, Precision], ...] = (
    ("float32", "float32", "float"),
    ("bfloat16", "bfloat16", "float"),
    ("int8", "float32", "int8"),
    ("int4", "float32", "int4"),
)
PACKAGES: Mapping[str, tuple[str, ...]] = {  # of a program, by its name before the first dash
    "hf": huggingface.PACKAGES,
    "llama.cpp": llama_cpp.PACKAGES,
    "graphs": exported.ONNXRUNTIME_PACKAGES,
    "onnxruntime": exported.ONNXRUNTIME_PACKAGES,
    "openvino": exported.OPENVINO_PACKAGES,
}


def main() -> None:
    reply_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # vendors' libraries warn about themselves
    with reply_to:
        pickle.dump(answer(pickle.load(sys.stdin.buffer)), reply_to)


def answer(task: Task) -> Reply:
    """Measure the task in this process. Errors become part of the reply."""
    try:
        return _measured(task)
    except MissingPackage as error:
        return Reply(problem="missing", reason=str(error))
    except Exception as error:
        return Reply(problem="failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])


def _measured(task: Task) -> Reply:
    torch.set_num_threads(task.threads)
    about = circumstances(load_before=load_average()) if task.engine.section == "machine" else {}
    started = time.perf_counter()
    if task.only_files:
        _file(task)
        return Reply(load_s=time.perf_counter() - started)
    opened = OPENERS[task.engine.section, task.engine.program](task)
    gc.collect()  # frees plain weights that packed ones have replaced
    load_s = time.perf_counter() - started
    return Reply(figures=list(_measure(task, opened)), load_s=load_s, packages=_packages(task), circumstances=about)


def _measure(task: Task, opened: Any) -> Iterator[Figure]:
    """Measure the figures of an open engine."""
    match task.engine.section:
        case "machine":
            yield from _ceilings(task.size)
            return
        case "job":
            figures = iter([_measure_job(opened)])
        case "decode":
            # llama.cpp's threads spin for longer than a step and would disturb the reading of memory.
            reader = MemoryReader(num_threads=task.threads) if task.engine.program == "ours" else None
            figures = measure_decoder(
                opened, task.rungs, num_steps=task.num_steps, budget_s=task.budget_s, reader=reader
            )
        case "vision":
            image_size = bare_tower(task.size).clip.image_size
            measured = measure_vision(opened, task.rungs, image_size=image_size, budget_s=task.budget_s)
            error = _error(task, opened, image_size=image_size)
            figures = (replace(figure, error=error) for figure in measured)
    yield from (replace(figure, engine=task.engine.name) for figure in figures)


def _error(task: Task, encode: Encode, *, image_size: int) -> float:
    """Relative error of all tokens for the last sample picture; calibration uses the first ones.

    Our float32 output is the exact one; its task saves it in the work folder for the other engines. The error is 0,
    meaning unknown, if that file is missing or the output has another shape.
    """
    pixels = preprocess(load_picture(sample_files()[-1]).image, size=image_size)[None]
    found = torch.as_tensor(encode(pixels)).double().numpy()
    exact = Path(task.work) / task.size / "exact-tokens.npy"
    if task.engine.program == "ours" and task.engine.dtype == "float32" and task.engine.precision == "float":
        exact.parent.mkdir(parents=True, exist_ok=True)
        np.save(exact, found)
    if not exact.exists():
        return 0.0
    expected = np.load(exact)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected)) if found.shape == expected.shape else 0.0


def _ceilings(size: str) -> Iterator[Figure]:
    """Ceilings of the machine: `read` in bytes/s, and `matmul-...` in FLOPs/s for the layers of this size."""
    backend = open_backend("cpu")
    started = time.perf_counter()
    yield _ceiling("read", measure_bandwidth(backend), started=started)
    is_encoder = size in ENCODERS
    shapes = encoder_shapes(bare_tower(size)) if is_encoder else decoder_shapes(decoder_sizes(size))
    for name, dtype, precision in PRECISIONS:
        started = time.perf_counter()
        rate = measure_matmul(backend, shapes=shapes, dtype=DTYPES[dtype], precision=precision)
        yield _ceiling(f"matmul-{name}", rate, started=started)


def _ceiling(name: str, rate: float, *, started: float) -> Figure:
    return Figure(part="ceiling", engine=name, batch=1, rate=rate, spent_s=time.perf_counter() - started)


def _measure_job(job: OurJob | ReferenceJob) -> Figure:
    """Run the job once, after a short run with a single picture; the rate is in pictures per second."""
    job.run((2,))
    result = job.run()
    return Figure(
        part="job",
        batch=len(JOB_ENDS),
        rate=len(JOB_ENDS) / result.seconds,
        spent_s=result.seconds,
        stages_s=result.stages_s,
        answers=hashlib.sha256(repr(result.token_ids).encode()).hexdigest()[:12],
    )


def _file(task: Task) -> Path:
    """The file that the engine runs; it is created if it is missing."""
    return make_file(task.engine.file, work=Path(task.work), size=task.size, num_threads=task.threads)


def _packages(task: Task) -> dict[str, str]:
    """Versions of the engine's packages; for llama.cpp also its instruction sets."""
    program = task.engine.program
    told = versions(PACKAGES.get(program.partition("-")[0], ()))
    return {**told, "llama.cpp for": llama_cpp.instructions()} if program == "llama.cpp" else told


def _our_decoder(task: Task) -> OurDecoder:
    config, engine = decoder_sizes(task.size), task.engine
    # The encoder plays no part in decoding, so it is the smallest one.
    vision = encoder_sizes("vit-tiny", output_dim=config.dim)
    parts = open_parts(config, vision, dtype=engine.dtype, precision=engine.precision, batch_size=task.num_rows)
    return OurDecoder(parts.runner)


def _our_vision(task: Task) -> Encode:
    engine, sizes = task.engine, (decoder_sizes("tiny"), bare_tower(task.size))
    give_all_tokens()
    parts = open_parts(*sizes, dtype=engine.dtype, precision=engine.precision, batch_size=task.num_rows)
    return parts.vision.encode


def _job_sizes(task: Task) -> tuple[DecoderConfig, VisionConfig]:
    decoder, encoder = task.size.split("+")
    config = decoder_sizes(decoder)
    return config, encoder_sizes(encoder, output_dim=config.dim)


def _our_job(task: Task) -> OurJob:
    engine, sizes = task.engine, _job_sizes(task)
    return OurJob(open_parts(*sizes, dtype=engine.dtype, precision=engine.precision, batch_size=len(JOB_ENDS)))


def _reference_job(task: Task) -> ReferenceJob:
    config, vision = _job_sizes(task)
    return ReferenceJob(
        config,
        vision,
        decoder_state=decoder_state(config, eos_id=end_id(config.vocab_size)),
        encoder_state=encoder_state(vision),
        tokenizer=WiderTokenizer(config.vocab_size),
    )


def _huggingface(task: Task, *, cache: huggingface.CacheKind) -> huggingface.HuggingFaceDecoder:
    config = decoder_sizes(task.size)
    state = decoder_state(config, eos_id=end_id(config.vocab_size))
    return huggingface.HuggingFaceDecoder(state, config, dtype=DTYPES[task.engine.dtype], cache=cache)


def _huggingface_vision(task: Task) -> Encode:
    config = bare_tower(task.size)
    return huggingface.HuggingFaceVision(encoder_state(config), config.clip, dtype=DTYPES[task.engine.dtype]).encode


def _openvino(task: Task) -> Encode:
    batch_sizes = [batch for _, batch in task.rungs]
    return exported.open_openvino(_file(task), num_threads=task.threads, batch_sizes=batch_sizes)


OPENERS: Mapping[tuple[str, str], Callable[[Task], Any]] = {
    ("machine", "machine"): lambda task: None,
    ("decode", "ours"): _our_decoder,
    ("decode", "graphs"): lambda task: graphs.open_graphs(
        _file(task), num_rows=task.num_rows, num_threads=task.threads
    ),
    ("decode", "hf-dynamic"): lambda task: _huggingface(task, cache="dynamic"),
    ("decode", "hf-static"): lambda task: _huggingface(task, cache="static"),
    ("decode", "llama.cpp"): lambda task: llama_cpp.LlamaCpp(
        _file(task), num_rows=task.num_rows, num_threads=task.threads
    ),
    ("job", "ours"): _our_job,
    ("job", "reference"): _reference_job,
    ("vision", "ours"): _our_vision,
    ("vision", "hf"): _huggingface_vision,
    ("vision", "onnxruntime"): lambda task: exported.open_onnxruntime(_file(task), num_threads=task.threads),
    ("vision", "openvino"): _openvino,
}


if __name__ == "__main__":
    main()
