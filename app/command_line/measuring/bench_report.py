"""Shows a benchmark's result as a table and as a plot."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.command_line.measuring.bench_result import BenchResult
from llama_adapter.app.jobs.report import numbers
from llama_adapter.runtime.partial import named_after

_STAGE_NAMES = {"step": "steps"}


def format_table(result: BenchResult) -> str:
    """Tables of batch sizes and programs, and the circumstances of the run."""
    lines = [headline(result.to_dict()), ""]
    stages = list(result.batches[0].stages_ms)
    lines.append(
        f"{'batch':>5} {'pictures/s':>11} {'tokens/s':>9} {'p50 ms':>8} {'p95 ms':>8}  "
        + " ".join(f"{_STAGE_NAMES.get(name, name):>8}" for name in stages)
        + "  bound by"
    )
    for batch in result.batches:
        bound = f"{batch.bound_by} ({batch.bounds[batch.bound_by]:.0%})"
        lines.append(
            f"{batch.batch_size:>5} {batch.pictures_per_s:>11.2f} {batch.tokens_per_s:>9.1f} "
            f"{batch.latency_p50_ms or 0:>8.1f} {batch.latency_p95_ms or 0:>8.1f}  "
            + " ".join(f"{batch.stages_ms[name]:>8.2f}" for name in stages)
            + f"  {bound}"
        )
    lines += ["read to rest: ms for each picture", ""]
    lines.append(
        f"{'batch':>5} {'program':<8} {'rows':>5} {'calls':>6} {'ms':>9} {'GB/s':>8} {'of peak':>8} {'GFLOP/s':>9} "
        f"{'of peak':>8}"
    )
    for batch in result.batches:
        for program, one in batch.programs.items():
            memory = f"{one.gbytes_per_s:>8.1f} {one.bandwidth_share:>8.0%}"
            arithmetic = f"{one.gflops_per_s:>9.1f} {one.matmul_share:>8.0%}"
            counts = f"{one.num_rows:>5} {one.num_calls:>6} {one.ms:>9.2f}"
            lines.append(f"{batch.batch_size:>5} {program:<8} {counts} {memory} {arithmetic}")
    return "\n".join([*lines, "", *circumstance_lines(result.to_dict())])


def headline(result: Mapping[str, Any]) -> str:
    """A line on model and workload, from `BenchResult.to_dict`."""
    asked = {
        "yesno": f"choice of Yes and No after {result['prompt_tokens']} tokens",
        "caption": f"up to {result['new_tokens']} new tokens after {result['prompt_tokens']}",
    }
    weights = f"decoder {_count(result['num_decoder_weights'])}, encoder {_count(result['num_encoder_weights'])}"
    return f"{result['model']} ({weights}), {result['workload']}: {asked[result['workload']]}"


def number_types(result: Mapping[str, Any]) -> str:
    """The number types, such as `float32` or `int8 and float32`."""
    return numbers(result["dtype"], result["precision"])


def circumstance_lines(result: Mapping[str, Any]) -> list[str]:
    """Lines on ceilings, device, settings and machine, from `BenchResult.to_dict`."""
    ceilings, facts = result["ceilings"], result["circumstances"]
    load = "unknown" if facts["load_before"] is None else " ".join(f"{value:.2f}" for value in facts["load_before"])
    warm_up = ", ".join(f"{batch['warm_up_s']:.1f} s" for batch in result["batches"])
    rounds = "one round" if result["rounds"] == 1 else f"medians of {result['rounds']} rounds"
    busy = ", ".join(f"{batch['busy_cpus']:.2f}" for batch in result["batches"])
    return [
        f"ceilings measured in this run: {ceilings['bytes_per_s'] / 1e9:.1f} GB/s, linear layers "
        f"{ceilings['decoder_flops_per_s'] / 1e9:,.0f} GFLOP/s (decoder's), "
        f"{ceilings['encoder_flops_per_s'] / 1e9:,.0f} GFLOP/s (encoder's)",
        f"{result['device']}, {number_types(result)}, {result['mode']} ({result['operators']}), encoder by "
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
        f"{headline(result.to_dict())}\n{result.device}, {number_types(result.to_dict())}, {result.mode}; "
        f"{facts['cpu']}, {facts['threads']} thread{'s' if facts['threads'] > 1 else ''}",
        fontsize="medium",
    )
    with named_after(place):
        figure.savefig(place, dpi=120)


def _count(number: int) -> str:
    """A number in words, such as 6.7 billion."""
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
