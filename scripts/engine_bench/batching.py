"""Captions of different lengths, with continuous and with static batching on the same engine."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.app.command_line.measuring.meters import Meter, MeteredRunner, Program
from llama_adapter.app.models.roofline import NumberSizes
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.prompt import format_prompt
from scripts.common import in_turn

LEAST_TOKENS, MOST_TOKENS = 4, 64
_NEVER = -1  # not a token id, so captions end at their planned lengths
Policy = Literal["continuous", "static", "static, ended rows leave"]
POLICIES: tuple[Policy, ...] = ("continuous", "static", "static, ended rows leave")
_COMPARED: tuple[Policy, ...] = ("continuous", "static")
PrefixSource = Callable[[Sequence[int]], list[Prefix]]  # indices of pictures -> their prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Captions to generate: the number of tokens of each, their prompt, and their pictures."""

    lengths: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    prefixes: PrefixSource


def planned_lengths(number: int) -> tuple[int, ...]:
    """Lengths evenly spread from 4 to 64 tokens, in a fixed random order."""
    span = MOST_TOKENS - LEAST_TOKENS
    lengths = [LEAST_TOKENS + round(span * index / max(1, number - 1)) for index in range(number)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def static_steps(lengths: Sequence[int], num_slots: int) -> int:
    """Decode steps of static batches. The first token of a caption comes from its prompt."""
    return sum(max(lengths[start : start + num_slots]) - 1 for start in range(0, len(lengths), num_slots))


def full_steps(lengths: Sequence[int], num_slots: int) -> float:
    """Decode steps if each had a row in every slot: the fewest possible."""
    return sum(length - 1 for length in lengths) / num_slots


def measure_batching(
    parts: Parts, *, pixels_BHWC: np.ndarray, pictures: int, rounds: int, with_encoder: bool
) -> dict[str, Any]:
    """Measure the policies in turn, after one short warm-up job of each."""
    policies = _COMPARED if with_encoder else POLICIES
    prompt_ids = tuple(parts.model.tokenizer.encode(format_prompt(parts.info.default_prompt)))
    engine = Engine(parts.runner, eos_id=_NEVER)
    job = Job(
        lengths=planned_lengths(pictures),
        prompt_ids=prompt_ids,
        prefixes=_prefix_source(parts, engine, pixels_BHWC, with_encoder=with_encoder),
    )
    warm_up = Job(lengths=(LEAST_TOKENS,) * engine.num_slots, prompt_ids=prompt_ids, prefixes=job.prefixes)

    def timed(policy: Policy, *, job: Job = job) -> float:
        started = time.perf_counter()
        run_job(engine, job, policy=policy)
        parts.backend.synchronise()
        return time.perf_counter() - started

    for policy in policies:
        timed(policy, job=warm_up)
    seconds = in_turn(policies, timed, rounds=rounds)
    continuous = seconds["continuous"]
    return {
        "with_encoder": with_encoder,
        "pictures": pictures,
        "num_slots": engine.num_slots,
        "tokens": sum(job.lengths),
        "steps": {
            "static": static_steps(job.lengths, engine.num_slots),
            "full slots": full_steps(job.lengths, engine.num_slots),
        },
        "pictures_per_s": {policy: pictures / statistics.median(taken) for policy, taken in seconds.items()},
        "speedups": {
            policy: statistics.median(other / ours for other, ours in zip(taken, continuous, strict=True))
            for policy, taken in seconds.items()
        },
        "program_s": {} if with_encoder else {policy: _program_seconds(parts, job, policy) for policy in _COMPARED},
    }


def run_job(engine: Engine, job: Job, *, policy: Policy) -> list[int]:
    """Generate all captions.

    Returns the number of tokens of each; with "static" it is that of the longest in its batch.
    """
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
    runner = MeteredRunner(parts.runner, meter=meter, num_slots=parts.runner.config.num_slots, sizes=sizes)
    run_job(Engine(runner, eos_id=_NEVER), job, policy=policy)
    programs: tuple[Program, ...] = ("prefill", "mixed", "step")
    return {name: sum(call.seconds for call in meter.calls if call.program == name) for name in programs}


def _run_continuous(engine: Engine, job: Job, made: list[int]) -> None:
    """Encode another batch of pictures whenever fewer captions than slots are in progress."""
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
    """Run one full batch after another; rows run until the longest one ends, or leave when they end."""
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
    """Returns a function that encodes the requested pictures; without `with_encoder` they are encoded beforehand."""

    def encode(indices: Sequence[int]) -> list[Prefix]:
        chosen_BHWC = pixels_BHWC[[index % len(pixels_BHWC) for index in indices]]
        return engine.project_prefix(parts.vision.encode(chosen_BHWC))

    if with_encoder:
        return encode
    ready = encode(range(len(pixels_BHWC)))
    return lambda indices: [ready[index % len(ready)] for index in indices]
