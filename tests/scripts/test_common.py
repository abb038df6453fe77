"""Shared code of benchmarks."""

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import pytest

from scripts.bench import parse_settings, run_bench
from scripts.common import DOCS, in_fresh_process, in_turn
from scripts.pages.render import read


@dataclass(frozen=True)
class Settings:
    seconds: Annotated[float, ""] = 2.5
    clients: Annotated[tuple[int, ...], ""] = (1, 8)
    other: str = "kept"


FULL, QUICK = Settings(), Settings(seconds=0.5, clients=(1,))


def parsed(*arguments: str) -> tuple[Settings, Path | None]:
    return parse_settings("", arguments, page="x", full=FULL, quick=QUICK)[:2]


def test_flags_replace_fields_and_a_quick_run_writes_only_into_a_given_folder(tmp_path: Path) -> None:
    assert parsed() == (FULL, DOCS)
    assert parsed("--clients", "2", "3") == (Settings(clients=(2, 3)), DOCS)
    assert parsed("--quick", "--seconds", "1") == (Settings(seconds=1.0, clients=(1,)), None)
    assert parsed("--quick", "--out", str(tmp_path / "new")) == (QUICK, tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_chosen_parts_are_measured_and_written_with_their_circumstances(tmp_path: Path) -> None:
    parts = {name: lambda settings, name=name: {"seconds": settings.seconds, "is": name} for name in "ab"}
    flags = ["--quick", "--out", str(tmp_path), "--part", "b"]

    found = run_bench("", flags, measure=parts, page="own-pictures", packages=["numpy"], full=FULL, quick=QUICK)

    assert found == read("own-pictures", tmp_path)
    assert found.keys() == {"b"}
    assert (found["b"]["seconds"], found["b"]["is"]) == (0.5, "b")
    assert {"python", "numpy"} <= found["b"]["circumstances"]["versions"].keys()


def test_packages_of_a_part_are_wanted_for_it_alone_and_before_the_first_part() -> None:
    measured: list[str] = []
    parts = {name: lambda settings, name=name: measured.append(name) or {} for name in "ab"}
    options: dict[str, Any] = {"measure": parts, "page": "own-pictures", "packages": {"b": ["no-such-package"]}}

    found = run_bench("", ["--quick", "--part", "a"], **options, full=FULL, quick=QUICK)
    with pytest.raises(metadata.PackageNotFoundError, match="no-such-package"):
        run_bench("", ["--quick"], **options, full=FULL, quick=QUICK)

    assert (list(found), measured) == (["a"], ["a"])


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--seconds", "nan"], ["--clients", "1", "-1"]])
def test_values_that_are_not_above_0_are_usage_errors(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*flags)
    assert ended.value.code == 2


def test_every_way_is_measured_once_in_each_round() -> None:
    order: list[str] = []

    assert in_turn("ab", lambda way: order.append(way) or len(order), rounds=2) == {"a": [1, 3], "b": [2, 4]}  # type: ignore[func-returns-value]
    assert order == ["a", "b", "a", "b"]


def test_a_fresh_process_is_another_one() -> None:
    assert in_fresh_process(os.getpid) != os.getpid()
