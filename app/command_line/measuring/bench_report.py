"""Shows a benchmark's result as a table and as a plot."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.command_line.measuring.bench_result import BenchResult
from llama_adapter.app.jobs.report import numbers
from llama_adapter.app.models.plan import table_lines
from llama_adapter.runtime.partial import named_after

_STAGE_NAMES = {"step": "steps"}


def format_table(result: BenchResult) -> str:
    """Tables of batch sizes and programs, and the circumstances of the run."""
    stages = [_STAGE_NAMES.get(name, name) for name in result.batches[0].stages_ms]
    rates = [["batch", "pictures/s", "tokens/s", "p50 ms", "p95 ms", *stages, "bound by"]]
    programs = [["batch", "program", "rows", "calls", "ms", "GB/s", "of peak", "GFLOP/s", "of peak"]]
    for batch in result.batches:
        size = str(batch.batch_size)
        latencies = [f"{ms or 0:.1f}" for ms in (batch.latency_p50_ms, batch.latency_p95_ms)]
        in_stages = [f"{ms:.2f}" for ms in batch.stages_ms.values()]
        bound = f"{batch.bound_by} ({batch.bounds[batch.bound_by]:.0%})"
        rates.append([size, f"{batch.pictures_per_s:.2f}", f"{batch.tokens_per_s:.1f}", *latencies, *in_stages, bound])
        for program, one in batch.programs.items():
            memory = [f"{one.gbytes_per_s:.1f}", f"{one.bandwidth_share:.0%}"]
            arithmetic = [f"{one.gflops_per_s:.1f}", f"{one.matmul_share:.0%}"]
            counts = [str(one.num_rows), str(one.num_calls), f"{one.ms:.2f}"]
            programs.append([size, program, *counts, *memory, *arithmetic])
    tables = [*table_lines(rates), "read to rest: ms for each picture", "", *table_lines(programs)]
    return "\n".join([headline(result.to_dict()), "", *tables, "", *circumstance_lines(result.to_dict())])


def headline(result: Mapping[str, Any]) -> str:
    """A line on model and workload, from `BenchResult.to_dict`."""
    asked = {
        "yesno": f"choice of Yes and No after {result['prompt_tokens']} tokens",
        "caption": f"up to {result['new_tokens']} new tokens after {result['prompt_tokens']}",
    }
    weights = f"decoder {_count(result['num_decoder_weights'])}, encoder {_count(result['num_encoder_weights'])}"
    return f"{result['model']} ({weights}), {result['workload']}: {asked[result['workload']]}"


def circumstance_lines(result: Mapping[str, Any]) -> list[str]:
    """Lines on ceilings, device, settings and machine, from `BenchResult.to_dict`."""
    ceilings, facts = result["ceilings"], result["circumstances"]
    load = "unknown" if facts["load_before"] is None else " ".join(f"{value:.2f}" for value in facts["load_before"])
    warm_up = ", ".join(f"{batch['warm_up_s']:.1f} s" for batch in result["batches"])
    types = numbers(result["dtype"], result["precision"])
    rounds = "one round" if result["rounds"] == 1 else f"medians of {result['rounds']} rounds"
    busy = ", ".join(f"{batch['busy_cpus']:.2f}" for batch in result["batches"])
    return [
        f"ceilings measured in this run: {ceilings['bytes_per_s'] / 1e9:.1f} GB/s, linear layers "
        f"{ceilings['decoder_flops_per_s'] / 1e9:,.0f} GFLOP/s (decoder's), "
        f"{ceilings['encoder_flops_per_s'] / 1e9:,.0f} GFLOP/s (encoder's)",
        f"{result['device']}, {types}, {result['mode']} ({result['operators']}), encoder by "
        f"{result['vision']}; device waited for at each stage; {result['pictures']} pictures a round, "
        f"{rounds}; warm-up of one batch each: {warm_up}; loaded in {result['load_s']:.1f} s",
        f"{facts['cpu']}, {facts['threads']} of {facts['num_cpus']} CPUs (kept busy: {busy}), "
        f"load before the run {load}; "
        + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        + (f", commit {facts['commit']}" if facts["commit"] else "")
        + f"; {facts['time']}",
    ]


def write_plot(result: BenchResult, place: str) -> None:
    """Draw stage times per picture, and shares of the ceilings, by batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    times, shares = figure.subplots(1, 2)
    labels = [str(batch.batch_size) for batch in result.batches]
    bottoms = [0.0] * len(labels)
    for name in result.batches[0].stages_ms:
        heights = [batch.stages_ms[name] for batch in result.batches]
        times.bar(labels, heights, bottom=bottoms, label=_STAGE_NAMES.get(name, name))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for label, bottom, batch in zip(labels, bottoms, result.batches, strict=True):
        times.annotate(f"{batch.pictures_per_s:.2f}/s", (label, bottom), ha="center", va="bottom")
    times.set(xlabel="batch size", ylabel="ms for each picture", title="time of a picture, and pictures/s")
    times.legend(fontsize="small")
    for program, ceiling in (("encoder", "matmul"), ("prefill", "matmul"), ("step", "bandwidth")):
        points = [
            (str(batch.batch_size), getattr(one, f"{ceiling}_share") * 100)
            for batch in result.batches
            for name, one in batch.programs.items()
            if name == program
        ]
        if points:
            shares.plot(*zip(*points, strict=True), marker="o", label=f"{program}, of {ceiling}")
    shares.axhline(100, color="grey", linewidth=0.8)
    shares.set(xlabel="batch size", ylabel="% of the measured ceiling", title="roofline", ylim=(0, None))
    shares.legend(fontsize="small")
    facts = result.circumstances
    figure.suptitle(
        f"{headline(result.to_dict())}\n{result.device}, {numbers(result.dtype, result.precision)}, {result.mode}; "
        f"{facts['cpu']}, {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}",
        fontsize="medium",
    )
    with named_after(place):
        figure.savefig(place, dpi=120)


def _count(number: int) -> str:
    """A number in words, such as 6.7 billion."""
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
