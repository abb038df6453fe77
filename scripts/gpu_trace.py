"""Traces steps, a prefill, the encoder and a caption job of 7B with ViT-L/14 on a GPU: kernels, and the time without.

Usage:
    python -m scripts.gpu_trace [--decoder 7B] [--encoder ViT-L/14] [--slots 256] [--on cpu]
    python -m scripts.gpu_trace --places 3000 [--context 4096] [--slots 4]      steps by kernels of today and proposed

Programs of split attention follow the context of the cache: in one that is much longer than the rows, most are empty.

Each part runs after rehearsals, in which programs are recorded. *busy* is the time in which some kernel runs, as a
share of the time from the first kernel's start to the last one's end; a *gap* is time between them without any. With
`--on cpu`, operators of the CPU stand in for kernels, which only shows that the code works.
"""

import functools
import gc
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import profiler

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.runtime.devices import open_backend
from scripts.common import parser_of, positive
from scripts.peers.ours import OurDecoder, OurJob, open_parts, use_tuning
from scripts.peers.sizes import CONTEXT, NUM_PROMPT_TOKENS, job_ends, prompt_ids
from scripts.peers.table import chosen_engines
from scripts.peers.weights import decoder_sizes, encoder_sizes

_SLOTS, _LONG_SLOTS = 256, 4
_REHEARSALS = 3  # a program is recorded when its shape occurs for the second time
_MOST_NAMED = 5  # kernels of a part
_NAME_LENGTH = 60


class Span(NamedTuple):
    """One kernel, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


def summary(part: str, spans: Sequence[Span]) -> Iterator[str]:
    """How a device spent the time of a part, with the kernels that took longest. Spans may overlap."""
    ordered = sorted(spans, key=lambda span: span.start)
    ends = list(itertools.accumulate((span.end for span in ordered), max))
    gaps = [max(0.0, span.start - end) for span, end in zip(ordered[1:], ends, strict=False)]
    window = ends[-1] - ordered[0].start
    yield (
        f"{part} | {window / 1e3:.2f} ms, busy {1 - sum(gaps) / window:.1%}, {len(ordered)} kernels, "
        f"longest gap {max(gaps, default=0.0) / 1e3:.3f} ms"
    )
    by_name: dict[str, list[float]] = defaultdict(list)
    for span in ordered:
        by_name[span.name].append(span.end - span.start)
    for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:_MOST_NAMED]:
        yield f"  {sum(times) / 1e3:9.3f} ms {sum(times) / window:6.1%} {len(times):6} x {name[:_NAME_LENGTH]}"


def traced(call: Callable[[], object], *, device: str) -> list[Span]:
    """Run a part after rehearsals, under torch's profiler."""
    backend = open_backend(device)
    for _ in range(_REHEARSALS):
        call()
    backend.synchronise()
    activities = profiler.ProfilerActivity
    activity = activities.CPU if device == "cpu" else activities.CUDA
    with profiler.profile(activities=(activity,), acc_events=True) as profile:
        call()
        backend.synchronise()
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == activity.name
    ]


def open_decoders(
    names: Sequence[str], decoder: str, encoder: str, *, context: int, slots: int, device: str
) -> Iterator[tuple[str, Parts]]:
    """Models by the names of their engines, one after the other, each with its tuning. The default one comes first.

    A caller that drops a model before it takes the next one needs memory for one alone.
    """
    config = replace(decoder_sizes(decoder), context=context)
    for engine in chosen_engines(names, "decode", "cuda"):
        if device == "cpu":
            engine = replace(engine, operators="aten")  # the profiler sees operators of torch alone
        elif engine.tuning:
            use_tuning(engine.tuning)
        gc.collect()  # frees the model before
        vision = encoder_sizes(encoder, output_dim=config.dim)
        yield engine.name, open_parts(config, vision, engine, num_rows=slots, device=device)


def long_steps(
    decoder: str, encoder: str, *, num_places: int, context: int, slots: int, device: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Steps of one row and of all slots, behind so many places. Proposed kernels split attention; see `TUNINGS`."""
    names, ids = ("ours-bfloat16", "ours-bfloat16-proposed"), prompt_ids(0, length=num_places)
    for name, parts in open_decoders(names, decoder, encoder, context=context, slots=slots, device=device):
        runner = OurDecoder(parts.runner)
        for num_rows in dict.fromkeys((1, slots)):
            tokens = runner.prefill([ids]) * num_rows
            runner.spread(num_rows)
            step = functools.partial(runner.step, tokens, num_places)
            yield f"a step, rows: {num_rows}, places: {num_places} of {context}, {name}", step
        del parts, runner, step


def parts_of(decoder: str, encoder: str, *, slots: int, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The parts by name; each call runs one of them."""
    opened = open_decoders(("ours-bfloat16",), decoder, encoder, context=CONTEXT, slots=slots, device=device)
    [(_, parts)] = opened
    runner = OurDecoder(parts.runner)
    for num_rows in dict.fromkeys((max(slots // 4, 1), slots)):
        ids = runner.prefill([prompt_ids(0)]) * num_rows
        runner.spread(num_rows)
        yield f"a step, rows: {num_rows}", functools.partial(runner.step, ids, NUM_PROMPT_TOKENS)
    prompts = [prompt_ids(row) for row in range(max(slots // 4, 1))]
    yield f"a prefill of {NUM_PROMPT_TOKENS} tokens each, prompts: {len(prompts)}", lambda: runner.prefill(prompts)
    side = parts.vision.pixels.image_size
    pixels = np.random.default_rng(0).integers(0, 256, (len(prompts), side, side, 3), dtype=np.uint8)
    yield f"the encoder, pictures: {len(prompts)}", lambda: parts.vision.encode(pixels)
    parts.runner.reset()
    job, ends = OurJob(parts), job_ends(2 * slots)
    yield f"a job of {len(ends)} pictures, slots: {slots}", lambda: job.run(ends)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--decoder", default="7B")
    parser.add_argument("--encoder", default="ViT-L/14")
    rows = f"rows of the job, or of the longer step (default: {_SLOTS}, with --places {_LONG_SLOTS})"
    parser.add_argument("--slots", type=positive(int), help=rows)
    parser.add_argument("--places", type=positive(int), help="only steps of 1 row and of all slots, after so many")
    parser.add_argument("--context", type=positive(int), help="with --places, of the cache (default: one place more)")
    parser.add_argument("--on", default="cuda", help="the device (default: cuda)")
    options = parser.parse_args(arguments)
    places, context = options.places, options.context or (options.places or 0) + 1
    if options.context and not (places and context > places):
        parser.error(f"--context {context}: it needs --places, and must be larger than these")
    trace = functools.partial(long_steps, num_places=places, context=context) if places else parts_of
    slots = options.slots or (_LONG_SLOTS if places else _SLOTS)
    for part, call in trace(options.decoder, options.encoder, slots=slots, device=options.on):
        for line in summary(part, traced(call, device=options.on)):
            print(line, flush=True)
        del call  # it holds the model, and the next part may need another one
    return 0


if __name__ == "__main__":
    sys.exit(main())
