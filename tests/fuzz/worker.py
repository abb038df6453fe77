"""One process of a campaign. It tries inputs of one target until its time is up, guided by coverage with atheris.

It has a memory limit, and a time limit per input. An input may kill it, so the file `current` holds the current input
for the campaign. campaign.py starts it as `python -m tests.fuzz.worker`.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

CURRENT, STATUS, CORPUS, FINDINGS = "current", "status.json", "corpus", "findings"
STATUS_EVERY_S = 0.5
MINIMISE_S = 15.0
_MOST_KEPT = 4_000  # entries of a corpus


@dataclass(kw_only=True)
class Status:
    """The progress of a worker, which the campaign reads from a file."""

    engine: str
    num_inputs: int = 0


class Worker:
    """Runs inputs of one target, and keeps inputs with new outcomes."""

    def __init__(self, name: str, *, folder: Path, seed: int, engine: str) -> None:
        from tests.fuzz.findings import finding_of, minimised
        from tests.fuzz.targets import TARGETS

        self.target = TARGETS[name]
        self.random = Random(seed)
        self._finding_of, self._minimised = finding_of, minimised
        self._folder, self._status = folder, Status(engine=engine)
        self._seen: set[str] = set()
        self._outcomes: set[str] = set()
        self._told_at = 0.0
        (folder / CORPUS).mkdir(parents=True, exist_ok=True)
        self._current = os.open(folder / CURRENT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def limit(self) -> None:
        """Set the memory limit."""
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        most = taken + self.target.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def try_one(self, data: bytes) -> bool:
        """Run one input; returns whether its outcome is new."""
        os.pwrite(self._current, data, 0)
        os.ftruncate(self._current, len(data))
        faulthandler.dump_traceback_later(self.target.limit_s, exit=True)
        found, outcome = self._finding_of(self.target, data)
        faulthandler.cancel_dump_traceback_later()
        self._status.num_inputs += 1
        if found is not None and found.signature not in self._seen:
            self._seen.add(found.signature)
            if not found.is_known:
                faulthandler.dump_traceback_later(MINIMISE_S + 2 * self.target.limit_s, exit=True)
                found = self._minimised(found, self.target, limit_s=MINIMISE_S)
                faulthandler.cancel_dump_traceback_later()
                found.save(self._folder / FINDINGS)
                print(f"finding: {found.signature}", file=sys.stderr, flush=True)
        is_new = outcome not in self._outcomes
        self._outcomes.add(outcome)
        if time.monotonic() - self._told_at > STATUS_EVERY_S:
            self.tell()
        return is_new and found is None

    def keep(self, data: bytes) -> None:
        """Add an input to the corpus."""
        path = self._folder / CORPUS / hashlib.sha256(data).hexdigest()[:16]
        if not path.exists():
            path.write_bytes(data)

    def tell(self) -> None:
        """Write the status file atomically."""
        self._told_at = time.monotonic()
        beside = self._folder / f"{STATUS}.new"
        beside.write_text(json.dumps(asdict(self._status)))
        os.replace(beside, self._folder / STATUS)

    def mutated(self, data: bytes) -> bytes:
        """A mutation of an input, of bounded size."""
        return self.target.mutate(data, self.random)[: self.target.max_bytes]

    def corpus(self) -> list[bytes]:
        """Seeds, the repository's corpus of the target, and inputs kept by earlier campaigns."""
        kept = sorted((self._folder / CORPUS).iterdir())[:_MOST_KEPT]
        return [*self.target.corpus().values(), *(path.read_bytes() for path in kept)]


def by_outcome(worker: Worker, *, ends_at: float) -> None:
    """Mutate inputs of the corpus, and keep those with a new outcome."""
    corpus = worker.corpus()
    worker.limit()
    for data in corpus:
        worker.try_one(data)
    while time.monotonic() < ends_at:
        # Half of the time, prefer recent inputs.
        recent = corpus[-20:] if worker.random.random() < 0.5 else corpus
        data = worker.mutated(worker.random.choice(recent))
        if worker.try_one(data):
            corpus.append(data)
            worker.keep(data)


def by_coverage(worker: Worker, atheris: object, *, ends_at: float, seed: int) -> None:
    """Run libFuzzer with the target's own mutations; does not return."""
    from tests.fuzz.mutators import mutated_bytes

    setup: Callable[..., object] = atheris.Setup  # type: ignore[attr-defined]
    as_bytes = mutated_bytes()  # libFuzzer's own mutations cannot be called from here (atheris 3.0)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        worker.random.seed(seed)
        if worker.random.random() < 0.2:
            return as_bytes(data, worker.random)[:max_size]
        return worker.mutated(data)[:max_size]

    corpus = worker.corpus()
    seeds = worker._folder / "seeds"
    seeds.mkdir(exist_ok=True)
    for data in corpus:
        (seeds / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    flags = [
        f"-max_total_time={max(1, round(ends_at - time.monotonic()))}",
        *(f"-max_len={worker.target.max_bytes}", f"-seed={seed}", "-timeout=3600", "-rss_limit_mb=0", "-len_control=0"),
        *(f"-artifact_prefix={worker._folder}/", "-reload=0", "-print_final_stats=1"),
    ]
    worker.limit()
    setup(
        [sys.argv[0], *flags, str(worker._folder / CORPUS), str(seeds)],
        lambda data: worker.try_one(data) and None,
        custom_mutator=mutate,
    )
    atheris.Fuzz()  # type: ignore[attr-defined]


def main() -> None:
    """Entry point for campaign.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float, help="from the first input on")
    parser.add_argument("seed", type=int)
    parser.add_argument("--instrument", nargs="*", default=[])
    parser.add_argument("--by-outcome", action="store_true")
    arguments = parser.parse_args()
    atheris = None
    if not arguments.by_outcome:
        with suppress(ImportError):
            import atheris  # type: ignore[no-redef]
    if atheris is None:
        worker = Worker(arguments.target, folder=arguments.folder, seed=arguments.seed, engine="outcome")
        by_outcome(worker, ends_at=time.monotonic() + arguments.seconds)
        worker.tell()
    else:
        with atheris.instrument_imports(include=arguments.instrument):  # type: ignore[attr-defined]
            worker = Worker(arguments.target, folder=arguments.folder, seed=arguments.seed, engine="atheris")
        by_coverage(worker, atheris, ends_at=time.monotonic() + arguments.seconds, seed=arguments.seed)


if __name__ == "__main__":
    main()
