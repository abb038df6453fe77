"""The sets of the benchmark of training, the methods beside the adapter, and the page."""

import copy
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scripts.own_pictures import sets, small_network
from scripts.own_pictures.baselines import accuracies, ridge
from scripts.own_pictures.scans import Scans
from scripts.own_pictures.sets import fewer, read_part, sets_of, write_set
from scripts.pages.render import render

FIGURE = {"value": 0.9, "low": 0.85, "high": 0.95}
ABOUT = {"cpu": "", "num_cpus": 2, "threads": 2, "load_before": None, "versions": {}, "commit": "", "time": ""}
ROW: dict[str, Any] = {"seconds": 60.0, "choices": FIGURE, "open": FIGURE, "num_trained": 320}


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in place of what scikit-learn and scikit-image contain."""
    rng = np.random.default_rng(0)
    scans = Scans(ink_NHW=rng.uniform(0, 16, (80, 8, 8)), digits_N=np.arange(80) % 10)
    noise = Image.fromarray(rng.integers(0, 256, (300, 400, 3), dtype=np.uint8))
    monkeypatch.setattr(sets, "load_scans", lambda: scans)
    monkeypatch.setattr(sets, "photograph", lambda name: noise)


@pytest.fixture
def hands(tmp_path: Path) -> Path:
    for number in range(50):
        path = tmp_path / "hands" / str(number % 10) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (5 * number, 0, 0)).save(path)
    return tmp_path / "hands"


@pytest.mark.usefixtures("without_packages")
def test_sets_are_functions_of_the_seed_with_equal_classes(hands: Path) -> None:
    assert "signs" not in sets_of(None)
    for name, make in sets_of(hands).items():
        more, again, other = make(3, 4), make(3, 2), make(4, 2)
        classes = [label for _, label in more]
        assert [classes.count(label) for label in dict.fromkeys(classes)] == [4] * 10, name
        first = [picture.tobytes() for number, (picture, _) in enumerate(more) if number % 4 < 2]
        assert first == [picture.tobytes() for picture, _ in again], name
        assert first != [picture.tobytes() for picture, _ in other], name
        assert len({picture.tobytes() for picture, _ in more}) == 40, name
        assert all(picture.mode == "RGB" for picture, _ in more), name


def test_a_set_is_written_once_as_folders_by_class_and_read_again(hands: Path, tmp_path: Path) -> None:
    pictures = sets_of(hands)["signs"](0, 5)
    write_set(tmp_path / "set", lambda: pictures, held_out=2)
    write_set(tmp_path / "set", lambda: pytest.fail("it is finished"), held_out=2)

    learn, held = (read_part(tmp_path / "set" / part) for part in ("learn", "held"))
    assert learn.classes == held.classes == tuple("0123456789")
    assert np.bincount(learn.labels_N).tolist() == [3] * 10
    assert np.bincount(held.labels_N).tolist() == [2] * 10
    assert held.pictures[2].tobytes() == pictures[5][0].tobytes()
    assert learn.pictures[0].tobytes() == pictures[2][0].tobytes()
    assert len(list(fewer(tmp_path / "set" / "learn", 2).glob("*/*.png"))) == 20


def _easy(rng: np.random.Generator) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Thirty points, of three classes that a line separates."""
    labels_N = np.arange(30) % 3
    return 4 * np.eye(5)[labels_N] + rng.normal(0, 0.3, (30, 5)), labels_N


def test_baselines_find_classes_that_a_line_separates() -> None:
    rng = np.random.default_rng(1)
    (learn_NF, labels_N), (held_MF, held_M) = _easy(rng), _easy(rng)
    names = ("grey pixels", "mean feature")

    found = accuracies(dict.fromkeys(names, learn_NF), labels_N, dict.fromkeys(names, held_MF), held_M)

    assert found == {
        "chance": pytest.approx(1 / 3),
        "nearest neighbour": 1.0,
        "ridge, grey pixels": 1.0,
        "ridge, mean feature": 1.0,
    }
    assert ridge(learn_NF[:3], labels_N[:3], held_MF).tolist() == held_M.tolist()  # one of each class
    shuffled_M = ridge(learn_NF, rng.permutation(labels_N), held_MF)
    assert (shuffled_M == held_M).mean() < 0.8


def test_the_small_network_learns_bright_and_dark_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_network, "time", SimpleNamespace(perf_counter=count().__next__))  # a step takes a second
    pictures = [(Image.new("RGB", (64, 64), (level,) * 3), str(level > 128)) for level in (*range(4), *range(252, 256))]
    write_set(tmp_path / "set", lambda: pictures, held_out=2)
    learn, held = (read_part(tmp_path / "set" / part) for part in ("learn", "held"))

    assert small_network.accuracy_after(40, learn, held, threads=torch.get_num_threads()) == 1.0


def test_the_page_names_the_sets_where_the_adapter_is_not_ahead() -> None:
    def row(name: str, best: float) -> dict[str, Any]:
        return {"set": name, "baselines": {"chance": 0.1, "small network": best}, **copy.deepcopy(ROW)}

    rows = [row("tools", 0.88), row("pages", 0.97), row("crops", 0.9)]
    counts = {"threads": 2, "learned": 40, "held_out": 20, "circumstances": ABOUT}
    splits = [
        {"bound": bound, "pictures": 100, "decided": decided, "right": right}
        for bound, decided, right in ((0.95, 60, 58), (0.96, 80, 75), (None, 0, 0))
    ]
    calibrated = {"set": "tools", "accuracy": 0.9, "splits": splits}
    figures = {
        "accuracy": {**counts, "rows": rows},
        "examples": {**counts, "rows": [{**rows[1], "per_class": 4}]},
        "calibration": {"promise": 0.95, "circumstances": ABOUT, "rows": [calibrated]},
    }

    page = render("own-pictures", figures)

    assert "| tools | 60 | 90.0 (85.0 to 95.0) | 90.0 (85.0 to 95.0) | 10.0 | 88.0 |" in page
    assert "**tools**" not in page
    assert '90.0 %, and that of the baseline "small network" is 97.0 %, outside the interval' in page
    assert '90.0 %, as is that of the baseline "small network", inside the interval' in page
    assert "ahead of every baseline on every set" not in page
    assert "| tools | 90.0 | 46.7 | 95.0 to 96.0 | 95.0 | 1 of 2 |" in page
    assert "| pages | 4 | 40 | 60 | 90.0 (85.0 to 95.0) | 97.0 | small network |" in page
    figures["accuracy"]["rows"] = rows[:1]
    assert "The adapter is ahead of every baseline on every set." in render("own-pictures", figures)
