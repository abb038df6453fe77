"""Computes a benchmark's result from its calls: rates, stages, shares of the ceilings."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llama_adapter.app.command_line.measuring.meters import PROGRAMS, Call, Program
from llama_adapter.app.jobs.report import percentile
from llama_adapter.app.models.roofline import Cause, Ceiling, explain

Workload = Literal["yesno", "caption"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Measured ceilings of the device: bytes/s, and FLOP/s for the linear layers of decoder and encoder."""

    bytes_per_s: float
    decoder_flops_per_s: float
    encoder_flops_per_s: float

    def of(self, program: Program) -> Ceiling:
        """The ceiling of one program."""
        flops_per_s = self.encoder_flops_per_s if program == "encoder" else self.decoder_flops_per_s
        return Ceiling(bytes_per_s=self.bytes_per_s, flops_per_s=flops_per_s)

    def best(self, other: "Ceilings") -> "Ceilings":
        """The higher value of each of two measurements."""
        names = [field.name for field in dataclasses.fields(self)]
        return Ceilings(**{name: max(getattr(self, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round: all pictures once, at one batch size."""

    wall_s: float
    cpu_s: float  # sum over all threads
    read_s: float
    num_pictures: int
    num_tokens: int
    latencies_ms: tuple[float, ...]
    calls: tuple[Call, ...]

    def stages_ms(self) -> dict[str, float]:
        """Milliseconds per picture for reading and each program, and the rest."""
        seconds: dict[str, float] = {"read": self.read_s, **dict.fromkeys(PROGRAMS, 0.0)}
        for call in self.calls:
            seconds[call.program] += call.seconds
        seconds["rest"] = max(self.wall_s - sum(seconds.values()), 0.0)
        return {name: value * 1e3 / self.num_pictures for name, value in seconds.items()}

    def bounds(self, ceilings: Ceilings) -> dict[Cause, float]:
        """Shares of the time by cause; see `roofline.explain`."""
        computed: list[tuple[float, float, Cause]] = []
        for call in self.calls:
            least, cause = ceilings.of(call.program).seconds(call.work)
            computed.append((call.seconds, least, cause))
        return explain(computed, read_s=self.read_s, wall_s=self.wall_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """The speed of a program in its largest calls, with `num_rows` pictures or rows each. Rates use the median time."""

    num_rows: int
    num_calls: int
    ms: float
    gbytes_per_s: float
    gflops_per_s: float
    bandwidth_share: float  # of the ceiling
    matmul_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """The result of one batch size: medians over the rounds. Latencies are over the pictures of all rounds."""

    batch_size: int
    pictures_per_s: float
    pictures_per_s_rounds: tuple[float, ...]
    tokens_per_s: float
    latency_p50_ms: float | None
    latency_p95_ms: float | None
    stages_ms: dict[str, float]
    programs: dict[Program, ProgramResult]
    bounds: dict[Cause, float]
    bound_by: Cause
    busy_cpus: float  # processor time / wall time; below the number of threads if other programs compute too
    warm_up_s: float
    num_warm_up_pictures: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """A whole run with its circumstances."""

    model: str
    num_decoder_weights: int
    num_encoder_weights: int
    workload: Workload
    question: str | None  # for workload yesno
    prompt_tokens: int
    new_tokens: int  # maximum per picture; 0 for yesno
    pictures: int  # in each round of each batch size
    rounds: int
    dtype: str
    precision: str  # number format of the linear layers' weights
    device: str
    mode: str
    operators: str
    vision: str
    load_s: float
    ceilings: Ceilings
    batches: tuple[BatchResult, ...]
    circumstances: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def summarise(rounds: Sequence[Round], *, batch_size: int, ceilings: Ceilings, warm_up_s: float) -> BatchResult:
    """The result of one batch size, after a warm-up of one batch. Raises ValueError without a round."""
    if not rounds:
        raise ValueError("at least one round is needed")
    rates = tuple(one.num_pictures / one.wall_s for one in rounds)
    stages = [one.stages_ms() for one in rounds]
    bounds = [one.bounds(ceilings) for one in rounds]
    shares = {cause: statistics.median(bound[cause] for bound in bounds) for cause in bounds[0]}
    latencies = sorted(latency for one in rounds for latency in one.latencies_ms)
    calls = [call for one in rounds for call in one.calls]
    results = {program: program_result(calls, program=program, ceiling=ceilings.of(program)) for program in PROGRAMS}
    return BatchResult(
        batch_size=batch_size,
        pictures_per_s=statistics.median(rates),
        pictures_per_s_rounds=rates,
        tokens_per_s=statistics.median(one.num_tokens / one.wall_s for one in rounds),
        latency_p50_ms=percentile(latencies, 0.50),
        latency_p95_ms=percentile(latencies, 0.95),
        stages_ms={name: statistics.median(stage[name] for stage in stages) for name in stages[0]},
        programs={program: result for program, result in results.items() if result is not None},
        bounds=shares,
        bound_by=max(shares, key=lambda cause: shares[cause]),
        busy_cpus=statistics.median(one.cpu_s / one.wall_s for one in rounds),
        warm_up_s=warm_up_s,
        num_warm_up_pictures=batch_size,
    )


def program_result(calls: Sequence[Call], *, program: Program, ceiling: Ceiling) -> ProgramResult | None:
    """The result of a program, from its calls with the most rows; None if it was not called."""
    mine = [call for call in calls if call.program == program]
    if not mine:
        return None
    num_rows = max(call.num_rows for call in mine)
    full = [call for call in mine if call.num_rows == num_rows]
    seconds = statistics.median(call.seconds for call in full)
    flops = statistics.fmean(call.work.flops for call in full)
    num_bytes = statistics.fmean(call.work.bytes for call in full)
    return ProgramResult(
        num_rows=num_rows,
        num_calls=len(full),
        ms=seconds * 1e3,
        gbytes_per_s=num_bytes / seconds / 1e9,
        gflops_per_s=flops / seconds / 1e9,
        bandwidth_share=num_bytes / seconds / ceiling.bytes_per_s,
        matmul_share=flops / seconds / ceiling.flops_per_s,
    )
