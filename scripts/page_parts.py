"""Sentences that pages of measurements share. Measures nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

BUSY = 0.5  # programs a core before the measurement, from which on a page says so


def company(about: Mapping[str, Any]) -> Iterator[str]:
    """Whether something else was computing, which spoils rates and times, and nothing else on a page."""
    (load, *_), cores = about["load_before"] or [0.0], about["num_cpus"]
    if load > BUSY * cores:
        yield (
            f"**The machine was not alone**: {load:.1f} programs wanted its {cores} cores "
            "when this began. Rates and times are worth little then; measure again on a quiet one."
        )
        yield ""


def circumstances_line(about: Mapping[str, Any]) -> str:
    """Processor, threads, load, versions, commit and time."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    load = about["load_before"]
    return (
        f"{about['cpu']}, {about['num_cpus']} cores, OMP_NUM_THREADS={about['omp_num_threads']}, "
        f"load before {load[0] if load else 'unknown'}; {versions}; commit {about['commit']}; {about['time']}."
    )
