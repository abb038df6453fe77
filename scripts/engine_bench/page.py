"""The measurements of the engine as a page of Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]

_INTRODUCTION = """\
# The engine

Measured by `python -m scripts.bench_engine`, which writes this page and [engine.json](engine.json). **160M** is a LLaMA
of that size with random weights, which never ends a caption by itself, behind an encoder of the embedded model's size,
random too.
"""
_BATCHING = """\
## Continuous against static batches

{pictures} pictures whose captions end after 4 to 64 tokens, planned in advance and evenly spread, in {num_slots} slots.
**Static** fills the slots, runs all rows until the longest of them ends, and begins anew; **rows leave** is the same
without computing rows that have ended. Both are done by the engine that does continuous batching, on the same requests;
the three in turn, {rounds} rounds, medians. The target is 1.6 times static. Prompts take the same time either way: the
last columns are seconds of prefill and of decode steps in one more job of each.
"""
_FOLDERS = """\
## From one picture to a folder of many

Captions of the embedded model, {dtype}, {num_slots} at a time; sample pictures, over and over, are read, encoded and
answered as by `llama-adapter caption`. Small jobs are repeated until they have answered 100. Processor time is of all
threads, and hardly depends on who else computes; memory is that of the whole process, in the first round. The target is
that throughput does not fall from one picture to 2,000.
"""
_STEPS = """\
## A decode step

One token for each row, {places} places attended to. **Linears** are the model's linear layers by themselves,
**attention** follows from what a step takes longer with more places, **other** is the rest of the device's program
(norms, rotary positions, activations, embeddings, copies), **host** the engine around it (choosing tokens, scheduling).
Overhead is other and host; the target is less than 10 % for 160M at 16 rows. Within a step, linear layers share the
caches with everything else; by themselves they may be a little faster, and the difference counts as overhead here.
"""


_READING = """\
## Reading pictures

`--reading exact` is the reference's way, equal to the bit: Pillow decodes and resizes. `--reading fast` decodes a large
JPEG at a half, a quarter or an eighth, never below twice the model's 224 pixels, and lets torch resize grey and RGB
pictures; all else is read exactly. One thread, a JPEG made of noise at many scales, from the file's bytes to the
model's pixels; differences are of levels, 0 to 255.
"""


def as_markdown(content: Content) -> str:
    """The page: a section for each measurement, and the circumstances."""
    batching, folders, steps = content["batching"], content["folders"], content["steps"]
    sections = [
        _INTRODUCTION,
        _BATCHING.format(**batching[0], rounds=content["rounds"]),
        _batching_table(batching),
        _FOLDERS.format(dtype=content["folder_dtype"], num_slots=content["folder_slots"]),
        _folder_table(folders),
        _STEPS.format(places=steps[0]["places"]),
        _step_table(steps),
        _READING,
        _reading_table(content["reading"], content["reading_change"]),
        "## Circumstances\n",
        _circumstances(content),
    ]
    return "\n".join(sections)


def _batching_table(rows: Sequence[Content]) -> str:
    lines = [
        "| decoder | type | job | continuous, pictures/s | static | rows leave | over static | over rows leave "
        "| continuous: prefill + steps | static: prefill + steps |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        rates, speedups = row["pictures_per_s"], row["speedups"]
        job = "with the encoder" if row["with_encoder"] else "decoder only"
        leave = "static, ended rows leave"
        lines.append(
            f"| {row['model']} | {row['dtype']} | {job} | {rates['continuous']:.2f} | {rates['static']:.2f} "
            f"| {_rounded(rates.get(leave))} | {speedups['static']:.2f}x | {_rounded(speedups.get(leave), 'x')} "
            f"| {_programs(row, 'continuous')} | {_programs(row, 'static')} |"
        )
    return "\n".join(lines) + "\n"


def _rounded(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _programs(row: Content, policy: str) -> str:
    seconds = row["program_s"].get(policy)
    return "-" if seconds is None else f"{seconds['prefill']:.1f} + {seconds['step']:.1f} s"


def _folder_table(rows: Sequence[Content]) -> str:
    lines = [
        "| pictures | pictures/s | rounds | processor ms a picture | resident MB | peak MB |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        rounds = ", ".join(f"{rate:.1f}" for rate in row["pictures_per_s_rounds"])
        lines.append(
            f"| {row['pictures']:,} | {row['pictures_per_s']:.1f} | {rounds} | {row['cpu_ms']:.2f} "
            f"| {row['resident_mb']:,.0f} | {row['peak_mb']:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def _step_table(rows: Sequence[Content]) -> str:
    lines = [
        "| decoder | type | rows | step ms | linears | attention | other | host | overhead |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        parts = " | ".join(f"{row[f'{name}_ms']:.2f}" for name in ("step", "linears", "attention", "other", "host"))
        lines.append(f"| {row['model']} | {row['dtype']} | {row['rows']} | {parts} | {row['overhead_share']:.1%} |")
    return "\n".join(lines) + "\n"


def _reading_table(rows: Sequence[Content], change: Content) -> str:
    lines = [
        "| megapixels | exact, pictures/s | fast, pictures/s | times | largest difference | mean difference |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        exact, fast = (row["pictures_per_s"][name] for name in ("exact", "fast"))
        lines.append(
            f"| {row['megapixels']} | {exact:.1f} | {fast:.1f} | {fast / exact:.1f} | {row['largest_difference']} "
            f"| {row['mean_difference']:.3f} |"
        )
    return "\n".join(lines) + (
        f"\n\nOf {change['pictures']} sample pictures, enlarged to JPEGs of 2.6 megapixels, the embedded model gives "
        f"{change['same_captions']} the same caption either way; its visual query differs by "
        f"{change['visual_query_difference']:.2%} (root mean square).\n"
    )


def _circumstances(content: Content) -> str:
    facts = content["circumstances"]
    load = "unknown" if facts["load_before"] is None else " ".join(f"{value:.2f}" for value in facts["load_before"])
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    return (
        f"{content['device']} ({content['operators']}), {facts['cpu']}, {facts['threads']} of {facts['num_cpus']} "
        f"CPUs, load before the run {load}; {versions}{commit}; {facts['time']}; {content['seconds']:.0f} s in all.\n"
    )
