"""docs/jobs.md of docs/jobs.json. Measures nothing."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scripts.page_parts import BUSY

Figures = Mapping[str, Any]

INTRODUCTION = """\
# Folder jobs, put to the proof

The embedded model on this machine's CPU, by `llama-adapter caption FOLDER --out FILE.jsonl`. This page is made of
[jobs.json](jobs.json) by `python -m scripts.prove_jobs`, each part by itself.
"""
NOT_MEASURED = "Not measured yet."


def as_markdown(content: Figures) -> str:
    """The page; a part that was not measured says so."""
    lines = [INTRODUCTION]
    for name, (title, told) in PARTS.items():
        part = content.get(name)
        lines += [f"## {title}", ""]
        lines += [*told(part), "", _circumstances(part["circumstances"]), ""] if part else [NOT_MEASURED, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _kills(part: Figures) -> Iterator[str]:
    again = Counter[int](part["begun_again"])
    yield (
        f"A job of {part['num_pictures']} pictures, {part['batch_size']} at a time, was ended by `kill -9` "
        f"{part['kills']} times, half of them at a random moment of a run's first seconds, loading included, and half "
        f"right after a random record, and taken up again each time, until {part['jobs']} jobs were done."
    )
    yield ""
    yield "| what is counted, in all jobs | |"
    yield "| --- | ---: |"
    yield f"| pictures without a record | {part['lost']} |"
    yield f"| pictures with two records | {part['doubled']} |"
    yield f"| answers unlike those of an undisturbed run | {part['different']} |"
    yield f"| lines that are no records, but for a torn last one | {part['unreadable_lines']} |"
    yield f"| torn last lines, mended by the next run | {part['torn_lines']} |"
    yield f"| runs that failed by themselves | {len(part['failed_runs'])} |"
    yield f"| pictures begun again after a kill, at most | {part['most_begun_again']} |"
    yield ""
    shares = "Such pictures and kills: " + ", ".join(f"{number}: {count}" for number, count in sorted(again.items()))
    yield (
        "Begun again means: it was handed to the engine, and its record had not been written. Of such pictures there "
        f"is never more than a batch. {shares}."
    )


def _disks(part: Figures) -> Iterator[str]:
    yield f"A job of {part['num_pictures']} pictures whose records go to a file system of 64 KB in memory."
    yield ""
    yield "| what happened | exit code | what it said |"
    yield "| --- | ---: | --- |"
    yield (
        f"| the disk is full after {part['records_kept']} records; the file ends with a whole one: "
        f"{'yes' if part['is_whole'] else 'no'} | {part['full_exit_code']} | `` {part['full_said']} `` |"
    )
    yield (
        f"| there is room, the same command again: {part['lost']} lost, {part['doubled']} doubled "
        f"| {part['completed_exit_code']} | |"
    )
    yield f"| a file system that is read-only | {part['read_only_exit_code']} | `` {part['read_only_said']} `` |"


def _memory(part: Figures) -> Iterator[str]:
    yield (
        f"One job over {part['num_pictures']:,} files. Resident memory of the process, and of the processes that read "
        "pictures for it, which share much of theirs."
    )
    yield ""
    yield "| records | process | its readers |"
    yield "| ---: | ---: | ---: |"
    for sample in part["samples"]:
        yield f"| {sample['num_records']:,} | {sample['own_mib']:.1f} MiB | {sample['readers_mib']:.1f} MiB |"
    first, last = part["samples"][0], part["samples"][-1]
    yield ""
    yield (
        f"From {first['num_records']:,} to {last['num_records']:,} records the process grew by "
        f"{last['own_mib'] - first['own_mib']:.1f} MiB. The same command again, with nothing left to do, took "
        f"{part['known_s']:.1f} s, start and loading included: every file is read and hashed, none decoded."
    )


def _resuming(part: Figures) -> Iterator[str]:
    rounds = ", ".join(f"{seconds:.2f}" for seconds in part["rounds"])
    yield (
        f"Looking through {part['num_records']:,} records ({part['file_mb']:.0f} MB) takes {part['seconds']:.2f} s, "
        f"the median of {rounds}. What stays in memory of them is {part['index_mb']:.1f} MB."
    )


def _waiting(part: Figures) -> Iterator[str]:
    yield (
        f"Captions by the embedded model, {part['rounds']} rounds in turn, medians. Waited is the share of the wall "
        "time in which the device had nothing to do for want of pictures."
    )
    yield ""
    yield "| pictures | read in | pictures/s | waited |"
    yield "| --- | --- | ---: | ---: |"
    for row in part["rows"]:
        yield f"| {row['pictures']} | {row['reader']} | {row['pictures_per_s']:.1f} | {row['waited']:.0%} |"


def _circumstances(about: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    (load, *_), cores = about["load_before"] or [0.0], about["num_cpus"]
    alone = "" if load <= BUSY * cores else f" **The machine was not alone**: {load:.1f} programs wanted its cores."
    return (
        f"Circumstances: {about['cpu']}, {cores} cores, torch on {about['threads']} threads, {versions}, commit "
        f"{about['commit']}, {about['time']}.{alone}"
    )


PARTS: dict[str, tuple[str, Callable[[Figures], Iterator[str]]]] = {
    "kills": ("Killed again and again", _kills),
    "disks": ("A full disk, and one that is read-only", _disks),
    "memory": ("Memory", _memory),
    "resuming": ("Going on", _resuming),
    "waiting": ("Waiting for pictures", _waiting),
}
