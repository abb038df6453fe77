"""`bench`: a workload at several batch sizes, compared with the ceilings of the device.

The captioner itself runs the workload, with meters around its encoder and executor.
"""

import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.command_line.measuring.bench_result import BenchResult, Ceilings, Round, Workload, summarise
from llama_adapter.app.command_line.measuring.meters import Meter, MeteredRunner, MeteredVision
from llama_adapter.app.jobs.report import circumstances, load_average
from llama_adapter.app.models.random_model import RandomLoader, parse_size
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.roofline import (
    decoder_shapes,
    decoder_weights,
    encoder_shapes,
    encoder_weights,
    number_sizes,
)
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.conversation import format_prompt
from llama_adapter.runtime.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.runtime.devices import EAGER, resolve_dtype
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.config import ChannelOrder

QUESTION = "Is there a person in the picture? Answer Yes or No."
CHOICES = ("Yes", "No")
NUM_NEW_TOKENS = 64
_NUM_WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchJob:
    """What to measure. The spec's `batch_size` has no effect."""

    spec: CaptionerSpec
    random: str | None = None  # a size of app/models/random_model.py, instead of the spec's model
    workload: Workload = "yesno"
    question: str = QUESTION  # for workload yesno
    batch_sizes: tuple[int, ...] = (1, 5, 16)
    pictures: int = 25  # in each round of each batch size
    rounds: int = 3
    trace: str | None = None  # a folder for a trace of one more round of each batch size

    def __post_init__(self) -> None:
        require_least(self, "pictures", "rounds")
        if self.pictures < (largest := max(self.batch_sizes, default=1)):  # its batches would not be full
            raise ValueError(f"pictures must be at least {largest}, the largest batch size, got {self.pictures}")
        if self.question != QUESTION and self.workload != "yesno":
            raise ValueError("question is for yesno, and caption has the model's own instruction")
        if self.random is not None:
            parse_size(self.random)
            if not self.spec.is_embedded:
                raise ValueError("random is a model of its own: leave out the flags that name another")


def run_bench(job: BenchJob, *, tell: Callable[[str], None] = lambda line: None) -> BenchResult:
    """Run the benchmark; `tell` gets a line after each step. Raises LlamaAdapterError, OSError and ValueError."""
    load_before = load_average()
    started = time.perf_counter()
    spec = dataclasses.replace(job.spec, batch_size=max(job.batch_sizes))
    parts = assemble_parts(spec, load=None if job.random is None else _random_loader(job.random, spec))
    gc.collect()  # releases weights that were replaced by packed ones
    load_s = time.perf_counter() - started
    tell(f"{parts.info.name} was loaded in {load_s:.1f} s")
    for note in parts.info.notes:
        tell(f"note: {note}")
    try:
        ceilings = measure_ceilings(parts)
        benches = [_Bench(job, parts, batch_size=size) for size in dict.fromkeys(job.batch_sizes)]
        for bench in benches:
            bench.warm_up()
            tell(f"batch size {bench.batch_size}: warm-up of {bench.warm_up_s:.1f} s")
        # Rounds of all batch sizes alternate, so that other load on the machine affects all of them.
        for number, bench in itertools.product(range(job.rounds), benches):
            rate = bench.run_round()
            tell(f"batch size {bench.batch_size}: round {number + 1} of {job.rounds}, {rate:.2f} pictures/s")
        ceilings = ceilings.best(measure_ceilings(parts))
        if job.trace is not None:
            for bench in benches:
                bench.trace(job.trace, tell=tell)
    finally:
        parts.close()
    prompt_tokens = len(parts.model.tokenizer.encode(format_prompt(_instruction(job, parts))))
    room = parts.info.context - prompt_tokens
    return BenchResult(
        model=parts.info.name,
        num_decoder_weights=decoder_weights(parts.model.decoder_config),
        num_encoder_weights=encoder_weights(parts.model.vision_config),
        workload=job.workload,
        question=job.question if job.workload == "yesno" else None,
        prompt_tokens=prompt_tokens,
        new_tokens=0 if job.workload == "yesno" else min(NUM_NEW_TOKENS, room),
        pictures=job.pictures,
        rounds=job.rounds,
        dtype=parts.info.dtype,
        precision=parts.info.precision,
        device=parts.info.device,
        mode=parts.info.mode,
        operators=parts.info.operators,
        vision=parts.info.vision,
        load_s=load_s,
        ceilings=ceilings,
        batches=tuple(
            summarise(bench.rounds, batch_size=bench.batch_size, ceilings=ceilings, warm_up_s=bench.warm_up_s)
            for bench in benches
        ),
        circumstances=circumstances(load_before=load_before),
    )


def measure_ceilings(parts: Parts) -> Ceilings:
    """The ceilings of the device, for the shapes of the model's linear layers."""
    backend, model = parts.backend, parts.model
    matmul = functools.partial(measure_matmul, backend, dtype=model.dtype, precision=model.precision)
    return Ceilings(
        bytes_per_s=measure_bandwidth(backend),
        decoder_flops_per_s=matmul(shapes=decoder_shapes(model.decoder_config)),
        encoder_flops_per_s=matmul(shapes=encoder_shapes(model.vision_config)),
    )


class _Bench:
    """One batch size: a captioner with this number of slots, on shared weights."""

    def __init__(self, job: BenchJob, parts: Parts, *, batch_size: int) -> None:
        self.batch_size = batch_size
        self.warm_up_s = 0.0
        self.rounds: list[Round] = []
        self._job = job
        self._instruction = _instruction(job, parts)
        files = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
        self._pictures = list(itertools.islice(itertools.cycle(files), job.pictures))
        self._meter = Meter(synchronise=parts.backend.synchronise)
        dtype = resolve_dtype(parts.info.dtype, backend=parts.backend)
        sizes = number_sizes(parts.backend, dtype=dtype, precision=parts.info.precision, wanted=parts.spec.operators)
        metered = dataclasses.replace(
            parts,
            spec=dataclasses.replace(parts.spec, batch_size=batch_size),
            vision=MeteredVision(parts.vision, meter=self._meter, config=parts.model.vision_config, sizes=sizes),
            runner=MeteredRunner(parts.runner, meter=self._meter, num_slots=batch_size, sizes=sizes),
        )
        self._captioner = Captioner(metered)

    def warm_up(self) -> None:
        """Run one full batch with short answers, so that kernels are chosen and memory is allocated.

        In a graph mode, the programs of all shapes are compiled too. Some are recorded when their shape occurs again.
        """
        started = time.perf_counter()
        is_eager = self._captioner.info.mode == EAGER
        if not is_eager and self._job.workload == "caption":
            self._captioner.warm_up(self._instruction, max_new_tokens=NUM_NEW_TOKENS)
        for _ in range(1 if is_eager else 2):
            self._answer(self._pictures[: self.batch_size], max_new_tokens=_NUM_WARM_UP_TOKENS)
        self.warm_up_s = time.perf_counter() - started

    def run_round(self) -> float:
        """Answer all pictures once; returns pictures per second."""
        self._meter.calls.clear()
        clock = self._captioner.profile_clock()
        started, cpu_started = time.perf_counter(), time.process_time()
        answers = self._answer(self._pictures, max_new_tokens=NUM_NEW_TOKENS, clock=clock)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        self.rounds.append(
            Round(
                wall_s=wall_s,
                cpu_s=cpu_s,
                read_s=clock.seconds["read"],
                num_pictures=len(answers),
                num_tokens=sum(len(answer.token_ids) for answer in answers),
                latencies_ms=tuple(answer.ms["total"] for answer in answers),
                calls=tuple(self._meter.calls),
            )
        )
        return len(answers) / wall_s

    def trace(self, folder: str, *, tell: Callable[[str], None]) -> None:
        """Answer all pictures once more, and write a trace of this into `folder`."""
        with self._captioner.tracing(folder, tell=lambda text: tell(f"batch size {self.batch_size}: {text}")):
            self._answer(self._pictures, max_new_tokens=NUM_NEW_TOKENS)

    def _answer(self, files: list[str], *, max_new_tokens: int, clock: StageClock | None = None) -> list[Answer]:
        return self._captioner.generate(
            files,
            self._instruction,
            max_new_tokens=max_new_tokens,
            choices=CHOICES if self._job.workload == "yesno" else None,
            clock=clock,
        )


def _instruction(job: BenchJob, parts: Parts) -> str:
    return job.question if job.workload == "yesno" else parts.info.default_prompt


def _random_loader(size: str, spec: CaptionerSpec) -> RandomLoader:
    order: ChannelOrder = "rgb" if spec.channel_order == "auto" else spec.channel_order
    return RandomLoader(name=size, context=spec.context, channel_order=order, precision=spec.precision or FLOAT)
