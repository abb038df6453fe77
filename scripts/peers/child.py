"""A child process of the benchmark. It measures the engines of tasks, one after another.

Tasks are read from stdin. Each figure is written to stdout as soon as it is measured, and then the reply with all
figures of the task; everything is pickled. Output of libraries goes to stderr. Failures are also sent as replies.
"""

import functools
import gc
import hashlib
import os
import pickle
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.jobs.report import circumstances, load_average
from llama_adapter.app.models.random_model import WiderTokenizer
from llama_adapter.app.models.roofline import decoder_shapes, encoder_shapes
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.runtime.devices import DTYPES, open_backend
from llama_adapter.runtime.errors import TooLittleMemoryError
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess
from scripts.common import sample_files
from scripts.peers import exported, huggingface, llama_cpp, vllm
from scripts.peers.files import make_file
from scripts.peers.measuring import Encode, MemoryReader, measure_decoder, measure_vision
from scripts.peers.ours import OurDecoder, OurJob, open_parts, use_tuning
from scripts.peers.packages import MissingPackage, versions
from scripts.peers.reference import ReferenceJob
from scripts.peers.sizes import ENCODERS, job_ends, num_steps
from scripts.peers.table import ENGINES, Figure, Reply, Task
from scripts.peers.weights import (
    bare_tower,
    decoder_sizes,
    decoder_state,
    encoder_sizes,
    encoder_state,
    give_all_tokens,
)

_ENOUGH_S = 40.0  # after this time, no further batch size is compiled
_DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES: Mapping[str, tuple[str, ...]] = {  # of a program, by its name before the first dash
    "hf": huggingface.PACKAGES,
    "llama.cpp": llama_cpp.PACKAGES,
    "onnxruntime": exported.ONNXRUNTIME_PACKAGES,
    "openvino": exported.OPENVINO_PACKAGES,
    "vllm": vllm.PACKAGES,
}


def main() -> None:
    reply_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # vendors' libraries warn about themselves
    with reply_to:

        def send(part: Figure | Reply) -> None:
            pickle.dump(part, reply_to)
            reply_to.flush()

        while (task := _next_task()) is not None:
            send(answer(task, send=send))
            gc.collect()  # frees the engine
            if task.device != "cpu":
                open_backend(task.device).empty_caches()


def _next_task() -> Task | None:
    """The next task; None if there will be none."""
    try:
        task: Task = pickle.load(sys.stdin.buffer)
    except EOFError:
        return None
    return task


def answer(task: Task, *, send: Callable[[Figure], None] = lambda figure: None) -> Reply:
    """Measure the task in this process, and send each figure. Errors become part of the reply."""
    figures: list[Figure] = []
    try:
        return _measured(task, figures, send=send)
    except MissingPackage as error:
        return Reply(problem="missing", reason=str(error))
    except Exception as error:
        reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        return Reply(figures=figures, problem="failed", reason=reason)


def _measured(task: Task, figures: list[Figure], *, send: Callable[[Figure], None]) -> Reply:
    torch.set_num_threads(task.threads)
    is_compiled = task.engine.program == "hf-compiled"
    about = _circumstances(task) if task.engine.section == "machine" else {}
    if task.only_files:
        _file(task)
        return Reply()
    if task.engine.tuning or task.device != "cpu":  # tasks before this one may have used another
        use_tuning(task.engine.tuning or "measured")
    started = time.perf_counter()
    opened = OPENERS[task.engine.section, task.engine.program](task)
    gc.collect()  # frees plain weights that packed ones have replaced
    for figure in _measure(task, opened):
        figures.append(figure)
        send(figure)
        if is_compiled and time.perf_counter() - started > _ENOUGH_S:
            break
    if is_compiled and task.device != "cpu":
        huggingface.check_graphs()
    return Reply(figures=figures, packages=_packages(task), circumstances=about)


def _circumstances(task: Task) -> dict[str, Any]:
    """Machine, versions and time; if a GPU computes, its name, its driver, and the version of CUDA that torch uses."""
    about = circumstances(load_before=load_average())
    if task.device != "cpu":
        about |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda), "driver": _driver()}
    return about


def _driver() -> str:
    """The version of the GPU's driver, if the system states it."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return "" if found is None else found[0]


def _measure(task: Task, opened: Any) -> Iterator[Figure]:
    """Measure the figures of an open engine."""
    figures: Iterator[Figure]
    rehearse = task.engine.device != "cpu"
    match task.engine.section:
        case "machine":
            yield from _ceilings(task)
            return
        case "job":
            figures = (_measure_job(opened, batch, rehearse=rehearse) for _, batch in task.rungs)
        case "decode":
            # llama.cpp's threads spin for longer than a step and would disturb the reading of memory.
            is_read = task.engine.program == "ours" and not rehearse
            figures = measure_decoder(
                opened,
                task.rungs,
                num_steps=num_steps(task.size, device=task.engine.device),
                budget_s=task.budget_s,
                reader=MemoryReader(num_threads=task.threads) if is_read else None,
                rehearse=rehearse,
            )
        case "vision":
            image_size = bare_tower(task.size).clip.image_size
            measured = measure_vision(
                opened, task.rungs, image_size=image_size, budget_s=task.budget_s, rehearse=rehearse
            )
            # After the first figure, whose time then includes that of a compilation.
            error = functools.cache(lambda: _error(task, opened, image_size=image_size))
            figures = (replace(figure, error=error()) for figure in measured)
    yield from (replace(figure, engine=task.engine.name) for figure in figures)


def _error(task: Task, encode: Encode, *, image_size: int) -> float:
    """Relative error of all tokens for the last sample picture; calibration uses the first ones.

    Our float32 output is the exact one; its task saves it in the work folder for the other engines. The error is 0,
    meaning unknown, if that file is missing or the output has another shape.
    """
    pixels = preprocess(load_picture(sample_files()[-1]).image, rule=PixelRule(image_size=image_size))[None]
    found = torch.as_tensor(encode(pixels)).double().cpu().numpy()
    exact = Path(task.work) / task.size / f"exact-tokens-{task.device}.npy"
    if task.engine.program == "ours" and task.engine.dtype == "float32" and task.engine.precision == "float":
        exact.parent.mkdir(parents=True, exist_ok=True)
        np.save(exact, found)
    if not exact.exists():
        return 0.0
    expected = np.load(exact)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected)) if found.shape == expected.shape else 0.0


def _ceilings(task: Task) -> Iterator[Figure]:
    """Ceilings of the machine: `read` in bytes/s, and those of the task in FLOPs/s for the layers of this size."""
    backend, size = open_backend(task.device), task.size
    started = time.perf_counter()
    yield _ceiling("read", measure_bandwidth(backend), started=started)
    is_encoder = size in ENCODERS
    shapes = encoder_shapes(bare_tower(size)) if is_encoder else decoder_shapes(decoder_sizes(size))
    ours = [one for one in ENGINES if one.program == "ours" and one.device == task.engine.device]
    for name, engine in {one.ceiling: one for one in ours if one.ceiling in task.ceilings}.items():
        started = time.perf_counter()
        rate = measure_matmul(backend, shapes=shapes, dtype=DTYPES[engine.dtype], precision=engine.precision)
        yield _ceiling(name, rate, started=started)


def _ceiling(name: str, rate: float, *, started: float) -> Figure:
    return Figure(part="ceiling", engine=name, batch=1, rate=rate, spent_s=time.perf_counter() - started)


def _measure_job(job: OurJob | ReferenceJob, num_pictures: int, *, rehearse: bool) -> Figure:
    """Run the job once, after a run with a single picture or a rehearsal; the rate is in pictures per second."""
    ends = job_ends(num_pictures)
    job.run(ends if rehearse else (2,))
    result = job.run(ends)
    return Figure(
        part="job",
        batch=num_pictures,
        rate=num_pictures / result.seconds,
        spent_s=result.seconds,
        stages_s=result.stages_s,
        slots=job.num_slots,
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
    config = decoder_sizes(task.size)
    # The encoder plays no part in decoding, so it is the smallest one.
    vision = encoder_sizes("vit-tiny", output_dim=config.dim)
    return OurDecoder(_our_parts(task, config, vision).runner)


def _our_vision(task: Task) -> Encode:
    give_all_tokens()
    return _complete(task, _our_parts(task, decoder_sizes("tiny"), bare_tower(task.size)).vision.encode)


def _our_parts(task: Task, decoder: DecoderConfig, vision: VisionConfig) -> Parts:
    return open_parts(decoder, vision, task.engine, num_rows=task.num_rows, device=task.device)


def _complete(task: Task, encode: Encode) -> Encode:
    """An encoder that returns when the device has finished."""
    backend = open_backend(task.device)

    def complete(pixels_BHWC: NDArray[np.uint8]) -> object:
        encoded = encode(pixels_BHWC)
        backend.synchronise()
        return encoded

    return complete


def _job_sizes(task: Task) -> tuple[DecoderConfig, VisionConfig]:
    decoder, encoder = task.size.split("+")
    config = decoder_sizes(decoder)
    return config, encoder_sizes(encoder, output_dim=config.dim)


def _our_job(task: Task) -> OurJob:
    """With the engine's slots; as many as fit are the largest power of two that the memory plan accepts."""
    slots = task.engine.slots
    if slots is None:
        return OurJob(_our_parts(task, *_job_sizes(task)))
    rows = 1 << task.num_rows.bit_length() - 1 if slots == "most" else slots
    while True:
        try:
            return OurJob(_our_parts(replace(task, num_rows=rows), *_job_sizes(task)))
        except TooLittleMemoryError:
            if slots != "most" or rows == 1:
                raise
            rows //= 2


def _reference_job(task: Task) -> ReferenceJob:
    config, vision = _job_sizes(task)
    backend, dtype = open_backend(task.device), DTYPES[task.engine.dtype]
    return ReferenceJob(
        config,
        vision,
        decoder_state=decoder_state(config, dtype=dtype, device=backend.device),
        encoder_state=encoder_state(vision, dtype=dtype, device=backend.device),
        tokenizer=WiderTokenizer(config.vocab_size),
        num_rows=task.num_rows,
        backend=backend,
    )


def _huggingface(task: Task, *, cache: huggingface.CacheKind) -> huggingface.HuggingFaceDecoder:
    config, dtype = decoder_sizes(task.size), DTYPES[task.engine.dtype]
    state = decoder_state(config, **_drawn(task))
    return huggingface.HuggingFaceDecoder(state, config, dtype=dtype, cache=cache)


def _huggingface_vision(task: Task, *, is_compiled: bool = False) -> Encode:
    config, dtype = bare_tower(task.size), DTYPES[task.engine.dtype]
    state = encoder_state(config, **_drawn(task))
    encoder = huggingface.HuggingFaceVision(state, config.clip, dtype=dtype, is_compiled=is_compiled)
    return _complete(task, encoder.encode)


def _drawn(task: Task) -> dict[str, Any]:
    """Where and how random weights are drawn, as for our engine (`weights.random_weights`)."""
    if task.device == "cpu":
        return {}
    return {"dtype": DTYPES[task.engine.dtype], "device": open_backend(task.device).device}


def _llama_cpp(task: Task) -> llama_cpp.LlamaCpp:
    is_on_gpu = task.device != "cpu"
    if is_on_gpu:
        llama_cpp.require_gpu()
    return llama_cpp.LlamaCpp(_file(task), num_rows=task.num_rows, num_threads=task.threads, gpu=is_on_gpu)


def _vllm(task: Task) -> vllm.Vllm:
    vllm.require_vllm()  # before a file is made for it
    return vllm.Vllm(_file(task).parent, num_rows=task.num_rows, dtype=task.engine.dtype)


def _openvino(task: Task) -> Encode:
    batch_sizes = {1, *(batch for _, batch in task.rungs)}  # 1: the picture whose error is measured
    return exported.open_openvino(_file(task), num_threads=task.threads, batch_sizes=batch_sizes)


OPENERS: Mapping[tuple[str, str], Callable[[Task], Any]] = {
    ("machine", "machine"): lambda task: None,
    ("decode", "ours"): _our_decoder,
    ("decode", "hf-dynamic"): lambda task: _huggingface(task, cache="dynamic"),
    ("decode", "hf-static"): lambda task: _huggingface(task, cache="static"),
    ("decode", "hf-compiled"): lambda task: _huggingface(task, cache="compiled"),
    ("decode", "llama.cpp"): _llama_cpp,
    ("decode", "vllm"): _vllm,
    ("job", "ours"): _our_job,
    ("job", "reference"): _reference_job,
    ("vision", "ours"): _our_vision,
    ("vision", "hf"): _huggingface_vision,
    ("vision", "hf-compiled"): lambda task: _huggingface_vision(task, is_compiled=True),
    ("vision", "onnxruntime"): lambda task: exported.open_onnxruntime(_file(task), num_threads=task.threads),
    ("vision", "openvino"): _openvino,
}


if __name__ == "__main__":
    main()
