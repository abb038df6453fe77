"""The data of the training experiments: what new questions mean."""

from pathlib import Path

import numpy as np

from llama_adapter.app.learning.labelled.reading import read_examples
from scripts.train_embedded.world import scene_from_words
from scripts.training_proofs.new_questions import NEW_TASKS, write_drawings


def test_new_questions_have_the_answer_that_they_mean() -> None:
    rng = np.random.default_rng(4)
    words = (
        ("small", "red", "star", "top left"),
        ("large", "blue", "ring", "top right"),
        ("small", "white", "moon", "bottom right"),
    )
    star, ring, moon = words
    for task, things, wanted in (
        ("warm", words, {"star": "yes", "ring": "no"}),
        ("corners", (star, moon), {"": "yes"}),
        ("corners", (star, ring), {"": "no"}),
    ):
        asked = [NEW_TASKS[task].make(scene_from_words(things), rng) for _ in range(60)]
        found = {(question.text, question.answer) for question in asked if question is not None}
        assert {answer for _, answer in found} == set(wanted.values())
        assert all(any(name in text and answer == wanted[name] for name in wanted) for text, answer in found)


def test_drawings_for_a_new_task_are_sound_data_with_old_questions_beside(tmp_path: Path) -> None:
    write_drawings(tmp_path, "corners", counts=(4, 2, 3), seed=0)

    new, mixed = (read_examples(str(tmp_path / f"{name}.jsonl")) for name in ("new", "mixed"))
    for found in (new, mixed):
        found.require_sound()
    assert [example.split for example in new.examples] == ["train"] * 4 + ["validation"] * 2 + ["test"] * 3
    assert len({example.digest for example in new.examples}) == 9
    old = [example for example in mixed.examples if example.part == "old"]
    assert len(mixed.examples) - len(old) == 9
    assert 6 <= len(old) <= 12
    assert "test" not in {example.split for example in old}
