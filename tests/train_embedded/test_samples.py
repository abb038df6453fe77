"""The shipped sample pictures: what questions.jsonl says is what its pictures are."""

import json
from pathlib import Path

from PIL import Image

from scripts.train_embedded.questions import TASKS
from scripts.train_embedded.samples import draw_samples
from scripts.train_embedded.world import NEVER_DRAWN

PICTURES = Path(__file__).parents[2] / "assets" / "pictures"


def _lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]


def test_every_sample_picture_has_a_caption_and_clips_size() -> None:
    captions = {line["picture"] for line in _lines(PICTURES) if line["task"] == "caption"}
    files = {path.name for path in PICTURES.iterdir() if path.suffix in (".png", ".jpg")}
    assert captions == files
    assert len(files) >= 25
    for name in files:
        with Image.open(PICTURES / name) as image:
            assert image.size == (224, 224)
            assert image.mode == "RGB"


def test_sample_questions_cover_all_tasks_and_some_never_drawn_pairs() -> None:
    lines = _lines(PICTURES)
    assert {line["task"] for line in lines} == set(TASKS)
    captions = [line["answer"] for line in lines if line["task"] == "caption"]
    assert sum(any(f"{color} {shape}" in text for shape, color in NEVER_DRAWN) for text in captions) >= 5


def test_samples_are_drawn_again_with_the_same_questions(tmp_path: Path) -> None:
    draw_samples(tmp_path)
    assert (tmp_path / "questions.jsonl").read_text() == (PICTURES / "questions.jsonl").read_text()
