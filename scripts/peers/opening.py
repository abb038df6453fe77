"""Opens an engine in this process, and measures it."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from llama_adapter.app.measuring.roofline import decoder_shapes, encoder_shapes
from llama_adapter.app.models.random_model import WiderTokenizer
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.runtime.devices import DTYPES, open_backend
from llama_adapter.runtime.schemes import Precision
from llama_adapter.vision.config import VisionConfig
from scripts.peers import exported, huggingface, llama_cpp
from scripts.peers.files import end_id, make_file
from scripts.peers.measuring import Figure, Rungs, measure_decoder, measure_vision
from scripts.peers.ours import JobResult, OurDecoder, OurJob, OurVision, open_parts
from scripts.peers.packages import versions
from scripts.peers.reference import ReferenceJob
from scripts.peers.sizes import ENCODERS, JOB_ENDS
from scripts.peers.table import Engine
from scripts.peers.task import Task
from scripts.peers.weights import bare_tower, decoder_sizes, decoder_state, encoder_sizes, encoder_state

Named = tuple[str, Figure, dict[str, Any]]  # engine, figure, and additional values
Opener = Callable[[Task, Engine], Any]

PRECISIONS: tuple[tuple[str, str, Precision], ...] = (
    ("float32", "float32", "float"),
    ("bfloat16", "bfloat16", "float"),
    ("int8", "float32", "int8"),
)
PACKAGES: Mapping[str, tuple[str, ...]] = {  # of a program, by its name before the first dash
    "hf": huggingface.PACKAGES,
    "llama.cpp": llama_cpp.PACKAGES,
    "onnxruntime": exported.ONNXRUNTIME_PACKAGES,
    "openvino": exported.OPENVINO_PACKAGES,
}


def _ceilings(size: str) -> Iterator[tuple[str, Figure]]:
    """Ceilings of the machine: `read` in bytes/s, and `matmul-...` for the layers of that size in FLOPs/s."""
    backend = open_backend("cpu")
    started = time.perf_counter()
    yield "read", _ceiling(measure_bandwidth(backend), started=started)
    is_encoder = size in ENCODERS
    shapes = encoder_shapes(bare_tower(size)) if is_encoder else decoder_shapes(decoder_sizes(size))
    for name, dtype, precision in PRECISIONS:
        started = time.perf_counter()
        rate = measure_matmul(backend, shapes=shapes, dtype=DTYPES[dtype], precision=precision)
        yield f"matmul-{name}", _ceiling(rate, started=started)


def _ceiling(rate: float, *, started: float) -> Figure:
    return Figure(part="ceiling", batch=1, rate=rate, spent_s=time.perf_counter() - started)


def file_of(task: Task, engine: Engine) -> Path:
    """The file that the engine runs, made if it is missing."""
    return make_file(engine.file, work=Path(task.work), size=task.size, num_threads=task.threads)


def measure(task: Task, engine: Engine, opened: Any) -> Iterator[Named]:
    """Figures of an engine from `open_engine`."""
    if task.section == "machine":
        yield from ((name, figure, {}) for name, figure in _ceilings(task.size))
        return
    if task.section == "job":
        yield _measure_job(engine, opened)
        return
    rungs = Rungs(
        batch_sizes=task.batch_sizes,
        prefill_batch_sizes=task.prefill_batch_sizes,
        left_out=frozenset(task.left_out),
    )
    if task.section == "decode":
        figures = measure_decoder(opened, rungs, num_steps=task.num_steps, budget_s=task.budget_s)
    else:
        image_size = bare_tower(task.size).clip.image_size
        figures = measure_vision(opened, rungs, image_size=image_size, budget_s=task.budget_s)
    yield from ((engine.name, figure, {}) for figure in figures)


def about(engine: Engine) -> dict[str, str]:
    """Versions of the engine's packages, and the instruction sets of llama.cpp."""
    told = versions(PACKAGES.get(engine.program.partition("-")[0], ()))
    return {**told, "llama.cpp for": llama_cpp.instructions()} if engine.program == "llama.cpp" else told


def open_engine(task: Task, engine: Engine) -> Any:
    """The engine, loaded; raises MissingPackage, and whatever loading it raises."""
    return OPENERS[task.section, engine.program](task, engine)


def _measure_job(engine: Engine, job: OurJob | ReferenceJob) -> Named:
    """One run of the job, after a short one of a single picture; the rate is of pictures."""
    job.run((2,))
    result: JobResult = job.run()
    figure = Figure(part="job", batch=len(JOB_ENDS), rate=len(JOB_ENDS) / result.seconds, spent_s=result.seconds)
    answers = hashlib.sha256(repr(result.token_ids).encode()).hexdigest()[:12]
    return engine.name, figure, {"stages_s": result.stages_s, "answers": answers}


def _our_decoder(task: Task, engine: Engine) -> OurDecoder:
    config = decoder_sizes(task.size)
    # The encoder has no part in this: the smallest there is.
    vision = encoder_sizes("vit-tiny", output_dim=config.dim)
    most = max((*task.batch_sizes, *task.prefill_batch_sizes))
    parts = open_parts(config, vision, dtype=engine.dtype, precision=engine.precision, batch_size=most)
    return OurDecoder(parts.runner)


def _our_vision(task: Task, engine: Engine) -> OurVision:
    vision = bare_tower(task.size)
    parts = open_parts(
        decoder_sizes("tiny"), vision, dtype=engine.dtype, precision=engine.precision, batch_size=max(task.batch_sizes)
    )
    return OurVision(parts.vision)


def _job_sizes(task: Task) -> tuple[DecoderConfig, VisionConfig]:
    decoder, encoder = task.size.split("+")
    config = decoder_sizes(decoder)
    return config, encoder_sizes(encoder, output_dim=config.dim)


def _our_job(task: Task, engine: Engine) -> OurJob:
    config, vision = _job_sizes(task)
    return OurJob(open_parts(config, vision, dtype=engine.dtype, precision=engine.precision, batch_size=len(JOB_ENDS)))


def _reference_job(task: Task, engine: Engine) -> ReferenceJob:
    config, vision = _job_sizes(task)
    return ReferenceJob(
        config,
        vision,
        decoder_state=decoder_state(config, eos_id=end_id(config.vocab_size)),
        encoder_state=encoder_state(vision),
        tokenizer=WiderTokenizer(config.vocab_size),
    )


def _huggingface(cache: huggingface.CacheKind, *, compiled: bool = False) -> Opener:
    def open_it(task: Task, engine: Engine) -> huggingface.HuggingFaceDecoder:
        config = decoder_sizes(task.size)
        state = decoder_state(config, eos_id=end_id(config.vocab_size))
        return huggingface.HuggingFaceDecoder(state, config, dtype=DTYPES[engine.dtype], cache=cache, compiled=compiled)

    return open_it


def _huggingface_vision(task: Task, engine: Engine) -> huggingface.HuggingFaceVision:
    config = bare_tower(task.size)
    return huggingface.HuggingFaceVision(encoder_state(config), config.clip, dtype=DTYPES[engine.dtype])


def _llama_cpp(task: Task, engine: Engine) -> llama_cpp.LlamaCpp:
    most = max((*task.batch_sizes, *task.prefill_batch_sizes))
    flash = cast(llama_cpp.FlashAttention, task.flash)
    return llama_cpp.LlamaCpp(file_of(task, engine), num_rows=most, num_threads=task.threads, flash=flash)


def _onnxruntime(task: Task, engine: Engine) -> exported.OnnxRuntimeVision:
    return exported.OnnxRuntimeVision(file_of(task, engine), num_threads=task.threads)


def _openvino(task: Task, engine: Engine) -> exported.OpenVinoVision:
    precision: exported.OpenVinoPrecision = "bf16" if engine.dtype == "bfloat16" else "f32"
    return exported.OpenVinoVision(file_of(task, engine), num_threads=task.threads, precision=precision)


OPENERS: Mapping[tuple[str, str], Opener] = {
    ("machine", "machine"): lambda task, engine: None,
    ("decode", "ours"): _our_decoder,
    ("decode", "hf-dynamic"): _huggingface("dynamic"),
    ("decode", "hf-static"): _huggingface("static"),
    ("decode", "hf-compiled"): _huggingface("static", compiled=True),
    ("decode", "llama.cpp"): _llama_cpp,
    ("job", "ours"): _our_job,
    ("job", "reference"): _reference_job,
    ("vision", "ours"): _our_vision,
    ("vision", "hf"): _huggingface_vision,
    ("vision", "onnxruntime"): _onnxruntime,
    ("vision", "openvino"): _openvino,
}
