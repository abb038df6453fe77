"""Traces steps, a prefill, the encoder and a caption job of 7B with ViT-L/14 on a GPU: kernels, and the time without.

Usage: python -m scripts.gpu_trace [--decoder 7B] [--encoder ViT-L/14] [--slots 256] [--on cpu]

Each part runs after rehearsals, in which programs are recorded. *busy* is the time in which some kernel runs, as a
share of the time from the first kernel's start to the last one's end; a *gap* is time between them without any. With
`--on cpu`, operators of the CPU stand in for kernels, which only shows that the code works.
"""

import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import profiler

from llama_adapter.runtime.devices import open_backend
from scripts.bench import positive
from scripts.common import parser_of
from scripts.peers.ours import OurDecoder, OurJob, open_parts
from scripts.peers.sizes import NUM_PROMPT_TOKENS, job_ends, prompt_ids
from scripts.peers.table import chosen_engines
from scripts.peers.weights import decoder_sizes, encoder_sizes

_REHEARSALS = 3  # a program is recorded when its shape occurs for the second time
_MOST_NAMED = 5  # kernels of a part
_NAME_LENGTH = 60


class Span(NamedTuple):
    """One kernel, in microseconds of the profiler's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a device spent the time of a part, in milliseconds."""

    num_kernels: int
    window_ms: float  # from the first kernel's start to the last one's end
    busy_ms: float
    longest_gap_ms: float
    kernels: tuple[tuple[str, int, float], ...]  # name, calls and time of those that took longest

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "Summary":
        """Sum up at least one span. Spans may overlap."""
        ordered = sorted(spans, key=lambda span: span.start)
        ends = list(itertools.accumulate((span.end for span in ordered), max))
        gaps = [max(0.0, span.start - end) for span, end in zip(ordered[1:], ends, strict=False)]
        window = ends[-1] - ordered[0].start
        by_name: dict[str, list[float]] = defaultdict(list)
        for span in ordered:
            by_name[span.name].append((span.end - span.start) / 1e3)
        longest = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:_MOST_NAMED]
        return cls(
            num_kernels=len(ordered),
            window_ms=window / 1e3,
            busy_ms=(window - sum(gaps)) / 1e3,
            longest_gap_ms=max(gaps, default=0.0) / 1e3,
            kernels=tuple((name, len(times), sum(times)) for name, times in longest),
        )

    def lines(self, part: str) -> Iterator[str]:
        """The summary as text."""
        yield (
            f"{part} | {self.window_ms:.2f} ms, busy {self.busy_ms / self.window_ms:.1%}, {self.num_kernels} kernels, "
            f"longest gap {self.longest_gap_ms:.3f} ms"
        )
        for name, count, total_ms in self.kernels:
            yield f"  {total_ms:9.3f} ms {total_ms / self.window_ms:6.1%} {count:6} x {name[:_NAME_LENGTH]}"


def traced(call: Callable[[], object], *, device: str) -> Summary:
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
    return Summary.of(
        [
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in profile.events() or ()
            if event.device_type.name == activity.name
        ]
    )


def parts_of(decoder: str, encoder: str, *, slots: int, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The parts by name; each call runs one of them."""
    config = decoder_sizes(decoder)
    [engine] = chosen_engines(("ours-bfloat16",), "job", "cuda")
    if device == "cpu":
        engine = replace(engine, operators="aten")  # the profiler sees operators of torch alone
    parts = open_parts(config, encoder_sizes(encoder, output_dim=config.dim), engine, num_rows=slots, device=device)
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
    parser.add_argument("--slots", type=positive(int), default=256, help="rows of the job (default: 256)")
    parser.add_argument("--on", default="cuda", help="the device (default: cuda)")
    options = parser.parse_args(arguments)
    for part, call in parts_of(options.decoder, options.encoder, slots=options.slots, device=options.on):
        for line in traced(call, device=options.on).lines(part):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
