"""Every target handles its seeds, earlier findings, and a fixed number of mutations; a campaign finds and reports.

The mutations are the same each time. A failure prints the replay command.
"""

from collections import Counter
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.campaign import _ended_by
from tests.fuzz.findings import Finding, finding_of, minimised
from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import CURRENT

ANY_TARGET = pytest.mark.parametrize("name", TARGETS)


def told(found: Finding, folder: Path) -> str:
    """The message of a failed test, with the replay command."""
    path = found.save(folder)
    return f"{found.signature}\n{found.told}\nsee it again: python -m tests.fuzz replay {found.target} {path}"


@ANY_TARGET
def test_seeds_and_earlier_findings(name: str, tmp_path: Path) -> None:
    outcomes = []
    for data in TARGETS[name].corpus().values():
        found, outcome = finding_of(TARGETS[name], data)
        assert found is None, told(found, tmp_path)
        outcomes.append(outcome)

    assert any(outcome.startswith("ok") for outcome in outcomes), (
        "no seed is good, so nothing is tested behind the door"
    )


@ANY_TARGET
def test_mutations(name: str, tmp_path: Path) -> None:
    target, random = TARGETS[name], Random(name)
    good = list(target.corpus().values())
    outcomes: Counter[str] = Counter()
    for _ in range(target.quick_rounds):
        data = target.mutate(random.choice(good), random)[: target.max_bytes]
        found, outcome = finding_of(target, data)
        assert found is None, told(found, tmp_path)
        outcomes[outcome] += 1

    assert len(outcomes) >= 2, f"mutations of {name} change nothing: {outcomes}"


def test_a_worker_finds_every_target_in_its_room() -> None:
    for target in TARGETS.values():
        assert target in import_module(target.room).TARGETS


def test_corpus_files_are_small_and_belong_to_targets() -> None:
    for path in CORPUS.rglob("*"):
        if path.is_file():
            assert path.parent.name in TARGETS
            assert path.stat().st_size <= 16_384


def toy() -> Target:
    """A target with a bug: it raises KeyError for inputs with an X."""

    def run(data: bytes) -> str:
        if b"X" in data:
            raise KeyError("X")
        return "ok"

    return Target("toy", run, dict, lambda data, random: data)


def test_findings_are_minimised_and_replayable(tmp_path: Path) -> None:
    found, _ = finding_of(toy(), b"a" * 1000 + b"X" + b"b" * 777)
    assert found is not None

    smallest = minimised(found, toy(), limit_s=60)
    path = smallest.save(tmp_path)

    assert smallest.data == b"X"
    assert smallest.signature == found.signature
    assert path.read_bytes() == b"X"
    assert f"replay toy {path}" in path.with_name(path.name + ".txt").read_text()


def test_timeout_is_a_finding_at_its_place(tmp_path: Path) -> None:
    (tmp_path / CURRENT).write_bytes(b"slow")
    place = CORPUS.parents[2] / "vision" / "image.py"
    said = f'Timeout (0:00:10)!\nThread 0x7 (most recent call first):\n  File "{place}", line 9 in load_picture\n'

    found = _ended_by(toy(), tmp_path, code=1, said=said)

    assert found.data == b"slow"
    assert found.signature == 'takes more than 10 s: File "vision/image.py", line 9 in load_picture'


@pytest.mark.slow
def test_campaign_counts_inputs_and_keeps_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--minutes", "0.05", "--target", "wire-reply", "--folder", str(tmp_path)]

    assert main(["run", *flags]) == 0

    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| wire-reply |"))
    assert int(row.split("|")[3].replace(",", "")) > 20
    assert list((tmp_path / "wire-reply" / "corpus").iterdir())


def test_unknown_target_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--target", "nothing"])
    assert "wire-reply" in capsys.readouterr().err
