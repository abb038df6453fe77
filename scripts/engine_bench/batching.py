"""A job of captions that end at different lengths, by continuous batching and by static batches of the same engine."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llama_adapter.app.captioning.assemble import Parts
from llama_adapter.app.measuring.meters import Meter, MeteredExecutor, Program
from llama_adapter.app.measuring.roofline import NumberSizes
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.prompt import format_prompt

LEAST_TOKENS, MOST_TOKENS = 4, 64
_NEVER = -1  # no token's id: captions end at their planned lengths
Policy = Literal["continuous", "static", "static, ended rows leave"]
POLICIES: tuple[Policy, ...] = ("continuous", "static", "static, ended rows leave")
_COMPARED: tuple[Policy, ...] = ("continuous", "static")
PrefixSource = Callable[[Sequence[int]], list[Prefix]]  # indices of pictures -> what the decoder sees of them


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingResult:
    """Medians over rounds, of a job of `pictures`; `speedups` are medians of rounds against continuous batching."""

    with_encoder: bool
    pictures: int
    num_slots: int
    tokens: int  # of all captions, each at its own length
    pictures_per_s: dict[Policy, float]
    speedups: dict[Policy, float]
    program_s: dict[
        Policy, dict[Program, float]
    ]  # of one more job each, in which the device is waited for at each call


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Captions to make: the tokens of each, in order, and what they begin with."""

    lengths: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    prefixes: PrefixSource


def planned_lengths(number: int) -> tuple[int, ...]:
    """Lengths evenly from 4 to 64 tokens, in an order that is the same at every call."""
    span = MOST_TOKENS - LEAST_TOKENS
    lengths = [LEAST_TOKENS + round(span * index / max(1, number - 1)) for index in range(number)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def measure_batching(
    parts: Parts, *, pixels_BHWC: np.ndarray, pictures: int, rounds: int, with_encoder: bool
) -> BatchingResult:
    """The policies in turn, `rounds` times, after one short job of each that is not counted."""
    policies = _COMPARED if with_encoder else POLICIES
    prompt_ids = tuple(parts.model.tokenizer.encode(format_prompt(parts.info.default_prompt)))
    engine = Engine(parts.executor, eos_id=_NEVER)
    job = Job(
        lengths=planned_lengths(pictures),
        prompt_ids=prompt_ids,
        prefixes=_prefix_source(parts, engine, pixels_BHWC, with_encoder=with_encoder),
    )
    warm_up = Job(lengths=(LEAST_TOKENS,) * engine.num_slots, prompt_ids=prompt_ids, prefixes=job.prefixes)
    seconds: dict[Policy, list[float]] = {policy: [] for policy in policies}
    for number, policy in itertools.product(range(rounds + 1), policies):
        started = time.perf_counter()
        run_job(engine, job if number else warm_up, policy=policy)
        parts.backend.synchronise()
        if number:
            seconds[policy].append(time.perf_counter() - started)
    continuous = seconds["continuous"]
    return BatchingResult(
        with_encoder=with_encoder,
        pictures=pictures,
        num_slots=engine.num_slots,
        tokens=sum(job.lengths),
        pictures_per_s={policy: pictures / statistics.median(taken) for policy, taken in seconds.items()},
        speedups={
            policy: statistics.median(other / ours for other, ours in zip(taken, continuous, strict=True))
            for policy, taken in seconds.items()
        },
        # The encoder's share follows from the difference to a job without.
        program_s={} if with_encoder else {policy: _program_seconds(parts, job, policy) for policy in _COMPARED},
    )


def run_job(engine: Engine, job: Job, *, policy: Policy) -> list[int]:
    """Make all captions; returns how many tokens each got: with the policy static, as many as its batch's longest."""
    made = [0] * len(job.lengths)
    if policy == "continuous":
        _run_continuous(engine, job, made)
    else:
        _run_static(engine, job, made, to_longest=policy == "static")
    return made


def _program_seconds(parts: Parts, job: Job, policy: Policy) -> dict[Program, float]:
    meter = Meter(synchronise=parts.backend.synchronise)
    itemsize = parts.model.dtype.itemsize
    sizes = NumberSizes(weight=itemsize, other=itemsize)
    executor = MeteredExecutor(parts.executor, meter=meter, num_slots=parts.executor.num_slots, sizes=sizes)
    run_job(Engine(executor, eos_id=_NEVER), job, policy=policy)
    programs: tuple[Program, ...] = ("prefill", "step")
    return {name: sum(call.seconds for call in meter.calls if call.program == name) for name in programs}


def _run_continuous(engine: Engine, job: Job, made: list[int]) -> None:
    """No slot stays free: a batch of pictures is encoded whenever fewer captions than slots are under way."""
    waiting = iter(range(len(job.lengths)))
    exhausted = False
    while True:
        while not exhausted and engine.num_unfinished < engine.num_slots:
            batch = list(itertools.islice(waiting, engine.num_slots))
            exhausted = len(batch) < engine.num_slots
            _submit(engine, job, batch, lengths=[job.lengths[index] for index in batch])
        if not engine.num_unfinished:
            return
        _step(engine, made)


def _run_static(engine: Engine, job: Job, made: list[int], *, to_longest: bool) -> None:
    """Batches that fill the slots, one after the other; the rows run to the longest, or leave at their own end."""
    for start in range(0, len(job.lengths), engine.num_slots):
        batch = list(range(start, min(start + engine.num_slots, len(job.lengths))))
        lengths = [job.lengths[index] for index in batch]
        _submit(engine, job, batch, lengths=[max(lengths)] * len(batch) if to_longest else lengths)
        while engine.num_unfinished:
            _step(engine, made)


def _submit(engine: Engine, job: Job, indices: Sequence[int], *, lengths: Sequence[int]) -> None:
    if not indices:
        return
    for index, prefix, length in zip(indices, job.prefixes(indices), lengths, strict=True):
        sampling = SamplingParams(max_new_tokens=length)
        engine.submit(GenerateRequest(id=index, prompt_ids=job.prompt_ids, prefix=prefix, sampling=sampling))


def _step(engine: Engine, made: list[int]) -> None:
    for output in engine.step():
        made[output.request_id] += output.token_id is not None


def _prefix_source(parts: Parts, engine: Engine, pixels_BHWC: np.ndarray, *, with_encoder: bool) -> PrefixSource:
    """Encodes the pictures that are asked for, or has done so before the job."""

    def encode(indices: Sequence[int]) -> list[Prefix]:
        chosen_BHWC = pixels_BHWC[[index % len(pixels_BHWC) for index in indices]]
        return engine.project_prefix(parts.vision.encode(chosen_BHWC))

    if with_encoder:
        return encode
    ready = encode(range(len(pixels_BHWC)))
    return lambda indices: [ready[index % len(ready)] for index in indices]
