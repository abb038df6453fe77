"""Fitting and scoring the detector of unfamiliar pictures, with an encoder that needs no model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.train_embedded.familiar import FIT, FRESH, THRESHOLD, Floats, draw_own, fit
from scripts.train_embedded.familiar_score import area_under_curve, read_folder, share_above
from scripts.train_embedded.other_worlds import KINDS, draw_others
from scripts.train_embedded.render import Pixels
from scripts.train_embedded.world import PICTURE_SIZE


def quarters(pictures: Sequence[Pixels]) -> Floats:
    """Stands for an encoder: four visual queries with the differences between neighbouring pixels in each quarter."""
    half = PICTURE_SIZE // 2
    stacked = np.stack(pictures).astype(np.float32).reshape(-1, 2, half, 2, half, 3)
    differences = np.abs(np.diff(stacked, axis=2)).mean(axis=(2, 4)).reshape(-1, 4, 3)
    return np.asarray(differences, dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_other_worlds_are_deterministic_pictures(kind: str) -> None:
    first, again, other = (draw_others(kind, count=2, seed=seed) for seed in ((1, 2), (1, 2), (1, 3)))
    for picture in first:
        assert (picture.shape, picture.dtype) == ((PICTURE_SIZE, PICTURE_SIZE, 3), np.uint8)
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))


def test_own_pictures_of_each_use_are_different_ones() -> None:
    drawn = [draw_own(use=use, count=1)[0] for use in (FIT, THRESHOLD, FRESH)]
    drawn.append(draw_own(use=FRESH, count=1, never_drawn="with")[0])
    assert len({picture.tobytes() for picture in drawn}) == 4


def test_fitted_detector_separates_noise_from_the_world() -> None:
    ood_detector = fit([quarters, quarters], num_pictures=24)
    own, noise = (
        quarters(pictures) for pictures in (draw_own(use=FRESH, count=10), draw_others("noise", count=10, seed=(1,)))
    )

    assert share_above(ood_detector.distances(own), ood_detector) <= 20
    assert share_above(ood_detector.distances(noise), ood_detector) == 100.0
    assert share_above(np.array([0.0, np.nan]), ood_detector) == 50.0
    with pytest.raises(ValueError, match="four pictures or more"):
        fit([quarters], num_pictures=3)


def test_the_area_under_the_curve_counts_pairs() -> None:
    own = np.array([1.0, 2.0, 3.0])
    assert area_under_curve(own, own) == pytest.approx(0.5)
    assert area_under_curve(np.array([9.0]), own) == 1.0
    assert area_under_curve(np.array([2.5, 0.0]), own) == pytest.approx(1 / 3)


def test_folder_is_read_by_name_without_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (300, 200), "red").save(tmp_path / "b.png")
    Image.new("RGB", (20, 30), "blue").save(tmp_path / "a.png")
    (tmp_path / "c.png").write_bytes(b"broken")
    (tmp_path / "notes.txt").write_text("no picture")

    found = read_folder(tmp_path)
    assert [tuple(picture[0, 0]) for picture in found] == [(0, 0, 255), (255, 0, 0)]
    assert capsys.readouterr().err.count("left out") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no picture"):
        read_folder(tmp_path / "empty")
