"""The shipped sample pictures are those that are drawn, and questions.jsonl describes them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from scripts.train_embedded.samples import WHOLE, Sample, draw_samples, samples

ASSETS = Path(__file__).parents[3] / "assets"
PICTURES, BROKEN = ASSETS / "pictures", ASSETS / "broken"


def _lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return list(samples())


def test_drawing_again_gives_the_shipped_samples(drawn: Sequence[Sample]) -> None:
    asked = [(sample.name, each.task, each.text, each.answer) for sample in drawn for each in sample.questions]
    assert asked == [tuple(line.values()) for line in _lines(PICTURES)]
    assert {sample.name for sample in drawn} == {path.name for path in PICTURES.iterdir()} - {"questions.jsonl"}
    for sample in drawn:
        with Image.open(PICTURES / sample.name) as image:
            difference = np.abs(sample.pixels.astype(int) - np.asarray(image))
        if sample.name.endswith(".jpg"):  # JPEG removes some of the noise
            assert difference.mean() < 6, sample.name
        else:  # other processors may round a level differently
            assert difference.max() <= 2, sample.name


def test_writing_samples_and_broken_files(
    drawn: Sequence[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [sample for sample in drawn if sample.name in (WHOLE, "12-red-star.jpg")]
    monkeypatch.setattr("scripts.train_embedded.samples.samples", lambda: some)

    draw_samples(tmp_path / "pictures")

    names = [sample.name for sample in some]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {*names, "questions.jsonl"}
    assert _lines(tmp_path / "pictures") == [line for line in _lines(PICTURES) if line["picture"] in names]
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {path.name for path in BROKEN.iterdir()}
    whole = (tmp_path / "pictures" / WHOLE).read_bytes()
    assert (tmp_path / "broken" / "truncated.png").read_bytes() == whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("name", "code"), [("truncated.png", "truncated"), ("text.jpg", "not_a_picture"), ("empty.png", "empty")]
)
def test_broken_files_have_different_errors(name: str, code: str) -> None:
    with pytest.raises(PictureError) as caught:
        load_picture(BROKEN / name)
    assert caught.value.code == code
