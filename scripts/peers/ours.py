"""Our engine, measured like the others: assembled as for any captioner, with the shared weights."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.models.checkpoints import StreamedModel, streamed
from llama_adapter.app.models.number_formats import Dtype
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Request
from llama_adapter.llm.runners.base import Runner
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.devices import DTYPES, EAGER, open_backend
from llama_adapter.vision.config import VisionConfig
from scripts.common import sample_files
from scripts.peers import table
from scripts.peers.packages import MissingPackage
from scripts.peers.sizes import JOB_ENDS, NUM_PROMPT_TOKENS, prompt_ids
from scripts.peers.weights import random_weights


def use_tuning(name: str) -> None:
    """Compute products and attention of this process on a GPU as `triton_calls.TUNINGS` has it under this name."""
    from llama_adapter.runtime.devices import triton_calls

    triton_calls.tuning = triton_calls.TUNINGS[name]


def open_parts(
    decoder: DecoderConfig, vision: VisionConfig, engine: table.Engine, *, num_rows: int, device: str
) -> Parts:
    """A model of these sizes with random weights on a device, as the engine has it, with `num_rows` slots.

    A device without graphs computes in mode eager. Raises MissingPackage if weights of few bits would be widened,
    because their figures would be those of floats.
    """
    backend, dtype, precision = open_backend(device), DTYPES[engine.dtype], engine.precision
    if not backend.computes_in(precision, dtype, wanted=engine.operators):
        raise MissingPackage(f"{precision} weights would be widened here: the kernels for them are not available")
    mode = engine.mode if backend.capabilities.graph_modes else EAGER
    spec = CaptionerSpec(
        device=device,
        dtype=engine.dtype,
        precision=precision,
        batch_size=num_rows,
        mode=mode,
        operators=engine.operators,
    )
    drawn_on = None if device == "cpu" else backend.device

    def load(_: Dtype) -> StreamedModel:
        return streamed(random_weights(decoder, vision, dtype=dtype, precision=precision, device=drawn_on))

    return assemble_parts(spec, load=load)


class OurDecoder:
    """The runner with the adapter."""

    def __init__(self, runner: Runner) -> None:
        assert isinstance(runner, EagerRunner | KernelRunner), "its programs are called without plans"
        self._runner = runner
        config = runner.config.decoder
        visual_query_BQD = torch.randn(1, config.num_queries, config.dim, generator=torch.Generator().manual_seed(0))
        self._prefix = runner.project_prefix(visual_query_BQD)[0]
        self._num_tokens = 0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self._num_tokens = len(prompts[0])
        token_ids: list[int] = self._runner.prefill(
            prompts, [self._prefix] * len(prompts), first_slot=0
        ).best_R.tolist()
        return token_ids

    def spread(self, num_rows: int) -> None:
        for row in range(1, num_rows):
            self._runner.move(0, row, num_tokens=self._num_tokens)

    def step(self, token_ids: Sequence[int], position: int) -> list[int]:
        chosen: list[int] = self._runner.decode(token_ids, [position] * len(token_ids)).best_R.tolist()
        return chosen


class PlannedEngine(Engine):
    """An engine whose requests end after a number of tokens that depends on their prompt.

    Pictures may be submitted in any order, because reading one may take longer than reading the next.
    """

    def __init__(self, runner: Runner, *, eos_id: int) -> None:
        super().__init__(runner, eos_id=eos_id)
        self.ends: Mapping[tuple[int, ...], int] = {}  # by the ids of the prompt

    def submit(self, request: Request) -> None:
        assert isinstance(request, GenerateRequest)
        sampling = dataclasses.replace(request.sampling, max_new_tokens=self.ends[request.prompt_ids])
        super().submit(dataclasses.replace(request, sampling=sampling))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """A caption job: total seconds from files to texts, seconds by stage, and the tokens of each picture.

    The stages are those of a device with a queue, else the host's.
    """

    seconds: float
    stages_s: dict[str, float]
    token_ids: tuple[tuple[int, ...], ...]


class OurJob:
    """The caption job, run by the captioner."""

    def __init__(self, parts: Parts) -> None:
        self._engine = PlannedEngine(parts.runner, eos_id=parts.model.tokenizer.eos_id)
        self._captioner = Captioner(parts, engine=self._engine)
        self.num_slots = parts.runner.config.num_slots
        self._is_queued = parts.backend.capabilities.queued
        if parts.spec.mode != EAGER:
            parts.runner.warm_up(prompt_tokens=NUM_PROMPT_TOKENS, new_tokens=max(JOB_ENDS))

    def run(self, ends: Sequence[int]) -> JobResult:
        """Caption as many pictures as there are `ends`; each answer gets the number of tokens in its entry."""
        prompts = [prompt_ids(row) for row in range(len(ends))]
        self._engine.ends = {tuple(ids): end for ids, end in zip(prompts, ends, strict=True)}
        clock = self._captioner.profile_clock(waits=not self._is_queued)  # waiting would empty the queue
        started = time.perf_counter()
        answers = self._captioner.generate(
            [str(file) for file in sample_files(len(ends))],
            prompts,
            clock=clock,
        )
        seconds = time.perf_counter() - started
        assert [len(answer.token_ids) for answer in answers] == list(ends), "a caption did not end as planned"
        return JobResult(
            seconds=seconds,
            stages_s=clock.read_device_seconds() or dict(clock.seconds),
            token_ids=tuple(answer.token_ids for answer in answers),
        )
