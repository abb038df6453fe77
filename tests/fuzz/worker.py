"""One process of a campaign. It mutates inputs of one target until its time is up, and keeps those with new outcomes.

It has a memory limit, and a time limit per input. An input may kill it, so the file `current` holds the current input
for the campaign. campaign.py starts it as `python -m tests.fuzz.worker`.
"""

import faulthandler
import hashlib
import os
import resource
import sys
import time
from importlib import import_module
from pathlib import Path
from random import Random

from tests.fuzz.findings import finding_of, minimised
from tests.fuzz.target import Target

CURRENT, STATUS, CORPUS, FINDINGS = "current", "status", "corpus", "findings"
STATUS_EVERY_S = 0.5
MINIMISE_S = 15.0
_MOST_KEPT = 4_000  # entries of a corpus


class Worker:
    """Runs inputs of one target, and keeps inputs with new outcomes."""

    def __init__(self, target: Target, *, folder: Path, seed: int) -> None:
        self.target = target
        self.random = Random(seed)
        self._folder, self._num_inputs = folder, 0
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
        found, outcome = finding_of(self.target, data)
        faulthandler.cancel_dump_traceback_later()
        self._num_inputs += 1
        if found is not None and found.signature not in self._seen:
            self._seen.add(found.signature)
            faulthandler.dump_traceback_later(MINIMISE_S + 2 * self.target.limit_s, exit=True)
            found = minimised(found, self.target, limit_s=MINIMISE_S)
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
        """Write the number of inputs, which the campaign reads, atomically."""
        self._told_at = time.monotonic()
        beside = self._folder / f"{STATUS}.new"
        beside.write_text(str(self._num_inputs))
        os.replace(beside, self._folder / STATUS)

    def corpus(self) -> list[bytes]:
        """Seeds, the repository's corpus of the target, and inputs kept by earlier campaigns."""
        kept = sorted((self._folder / CORPUS).iterdir())[:_MOST_KEPT]
        return [*self.target.corpus().values(), *(path.read_bytes() for path in kept)]


def work(worker: Worker, *, ends_at: float) -> None:
    """Mutate inputs of the corpus, and keep those with a new outcome."""
    corpus, random, target = worker.corpus(), worker.random, worker.target
    worker.limit()
    for data in corpus:
        worker.try_one(data)
    while time.monotonic() < ends_at:
        # Half of the time, prefer recent inputs.
        recent = corpus[-20:] if random.random() < 0.5 else corpus
        data = target.mutate(random.choice(recent), random)[: target.max_bytes]
        if worker.try_one(data):
            corpus.append(data)
            worker.keep(data)
    worker.tell()


def main() -> None:
    """Entry point for campaign.py, which gives a room, a target, a folder, seconds from the first input on, and a seed.

    The room is the target's module: the others take seconds to import.
    """
    room, name, folder, seconds, seed = sys.argv[1:]
    target = next(target for target in import_module(room).TARGETS if target.name == name)
    worker = Worker(target, folder=Path(folder), seed=int(seed))
    work(worker, ends_at=time.monotonic() + float(seconds))


if __name__ == "__main__":
    main()
