"""The data of the training experiments: how scans are split, and what new questions mean."""

from pathlib import Path

import numpy as np
import pytest

from llama_adapter.app.learning.labelled.reading import read_examples
from scripts.train_embedded.world import scene_from_words
from scripts.training_proofs.digits import CHOICES, KNOWN_WORDS, Scans, divide, write_digits
from scripts.training_proofs.new_questions import NEW_TASKS, write_drawings

NUM_EACH = 9  # scans per digit


@pytest.fixture(scope="module")
def scans() -> Scans:
    digits_N = np.random.default_rng(2).permutation(np.arange(10 * NUM_EACH) % 10)
    return Scans(ink_NHW=np.random.default_rng(3).uniform(0, 16, size=(len(digits_N), 8, 8)), digits_N=digits_N)


def test_scans_are_divided_by_digit_and_held_out_ones_never_change(scans: Scans) -> None:
    first, second = (divide(scans.digits_N, seed=seed, num_train=4, num_validation=2) for seed in (0, 1))

    assert sorted([*first.train, *first.validation, *first.held_out]) == list(range(len(scans.digits_N)))
    assert np.array_equal(first.held_out, second.held_out)
    assert set(first.train) != set(second.train)
    for part, count in ((first.train, 4), (first.train[:20], 2), (first.validation, 2), (first.held_out, 3)):
        assert np.bincount(scans.digits_N[part]).tolist() == [count] * 10
    with pytest.raises(ValueError, match="more than 9 scans of the digit 0, got 9"):
        divide(scans.digits_N, seed=0, num_train=7, num_validation=2)


@pytest.mark.slow
def test_tables_and_folders_of_scans_are_sound_data(scans: Scans, tmp_path: Path) -> None:
    division = divide(scans.digits_N, seed=0, num_train=2, num_validation=2)
    write_digits(tmp_path, scans, division, sizes=(1, 2))

    folder = read_examples(str(tmp_path / "classes"))
    folder.require_sound()
    right = {example.digest: (example.answers[0], example.split) for example in folder.examples}
    assert len(right) == len(scans.digits_N)
    for name, num_train, words in (("digits-1", 10, CHOICES), ("words-2", 20, KNOWN_WORDS)):
        table = read_examples(str(tmp_path / f"{name}.jsonl"))
        table.require_sound()
        splits = [example.split for example in table.examples]
        assert [splits.count(split) for split in ("train", "validation", "test")] == [num_train, 20, 50]
        for example in table.examples:
            digit, split = right[example.digest]
            assert (example.choices, example.answers, example.split) == (words, (words[int(digit)],), split)


def test_new_questions_have_the_answer_that_they_mean() -> None:
    rng = np.random.default_rng(4)
    words = (
        ("small", "red", "star", "top left"),
        ("large", "blue", "ring", "top right"),
        ("small", "white", "moon", "bottom right"),
    )
    star, ring, moon = words
    for task, things, wanted in (
        ("diagonal", words, {"star": "a small white moon", "moon": "a small red star"}),
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
