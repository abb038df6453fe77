"""Every target handles its seeds, earlier findings, and changed inputs in bounded memory. See docs/fuzzing.md.

With FUZZ_MINUTES, as `make fuzz` sets it, the targets share so many minutes, and each input has a time limit.
"""

import faulthandler
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.conftest import ROOT
from tests.fuzz.mutators import mutated_bytes
from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
LIMIT_S = 20
MEMORY_BYTES = 2 * 2**30  # address space in addition to that of the imports
ANY_TARGET = pytest.mark.parametrize("name", TARGETS)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process have `MEMORY_BYTES` more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def bounded_time(stack: Path) -> Iterator[None]:
    """End this process if one input of a campaign takes far too long. hypothesis reports those that end too late."""
    with stack.open("w") as file:
        if MINUTES:
            faulthandler.dump_traceback_later(3 * LIMIT_S, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    stack.unlink()


def explore(target: Target, good: dict[str, bytes], file: Path) -> int:
    """Change good inputs, half as often as the profile says. Inputs with new outcomes are added to the good ones.

    The file has the last input. After a failure that is the smallest that hypothesis found, or one that has ended the
    process; where that took too long, a file beside it has the stack. Returns the number of inputs.
    """
    new: dict[str, bytes] = {}
    tried = 0

    @settings(
        max_examples=settings.default.max_examples // 2,
        deadline=timedelta(seconds=LIMIT_S) if MINUTES else None,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.changed(list(good.values())))
    def holds(data: bytes) -> None:
        nonlocal tried
        tried += 1
        file.write_bytes(data)
        with bounded_time(file.with_suffix(".stack")):
            new.setdefault(target.run(data), data)

    with bounded_memory():
        holds()
    good.update({outcome: data for outcome, data in new.items() if outcome not in good})
    return tried


@ANY_TARGET
def test_seeds_and_earlier_findings(name: str) -> None:
    outcomes = [TARGETS[name].run(data) for data in TARGETS[name].corpus().values()]

    assert any(outcome.startswith("ok") for outcome in outcomes), (
        "no seed is good, so nothing is tested behind the door"
    )


@ANY_TARGET
def test_changed_inputs(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    file = (ROOT / ".fuzz" if MINUTES else tmp_path) / name
    file.parent.mkdir(exist_ok=True)
    good = dict(TARGETS[name].corpus())
    num_seeds = len(good)
    ends_at = time.monotonic() + MINUTES * 60 / len(request.session.items)
    tried = explore(TARGETS[name], good, file)
    while time.monotonic() < ends_at:
        tried += explore(TARGETS[name], good, file)

    file.unlink()
    print(f"{tried:,} inputs, {len(good) - num_seeds} outcomes")
    assert len(good) >= num_seeds + 2, f"changes of {name} change nothing"


def test_corpus_files_are_small_and_belong_to_targets() -> None:
    for path in CORPUS.rglob("*"):
        if path.is_file():
            assert path.parent.name in TARGETS
            assert path.stat().st_size <= 16_384


def test_what_is_found_is_kept_small(tmp_path: Path) -> None:
    def run(data: bytes) -> str:
        assert b"X" not in data
        return "ok"

    with pytest.raises(AssertionError):
        explore(Target("toy", run, dict, mutated_bytes(b"X")), {"long": b"a" * 1000}, tmp_path / "toy")

    assert b"X" in (tmp_path / "toy").read_bytes()
    assert len((tmp_path / "toy").read_bytes()) <= 1001


def test_memory_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        explore(
            Target("toy", lambda data: str(len(bytearray(2 * MEMORY_BYTES))), dict, mutated_bytes()),
            {"one": b"a"},
            tmp_path / "toy",
        )
