"""Chunks of work: their sizes, what workers may leave out, and what follows a loss."""

from dataclasses import replace
from pathlib import Path

from llama_adapter.app.jobs.clusters.chunks import MAX_LOSSES, MAX_PICTURES, Chunk, in_chunks, sizes
from llama_adapter.app.pictures.inputs import PictureInput
from tests.app.jobs.clusters.made import QUESTIONS, item, known_after, planner_of


def test_chunks_grow_so_that_no_worker_waits_for_its_first() -> None:
    groups = list(in_chunks(map(item, range(500)), sizes(8, num_alike=4)))

    assert [len(group) for group in groups] == [8] * 4 + [16] * 4 + [32] * 4 + [64] * 4 + [20]
    assert [one.label for group in groups for one in group] == [f"{index}.png" for index in range(500)]


def test_chunks_are_bounded_in_pictures_and_bytes() -> None:
    assert next(sizes(1000, num_alike=1)) == MAX_PICTURES
    groups = list(in_chunks((item(index, size=20 * 2**20) for index in range(5)), sizes(64, num_alike=1)))
    assert [len(group) for group in groups] == [2, 2, 1]


def test_lost_chunks_are_tried_again_then_picture_by_picture_and_then_fail() -> None:
    chunk = Chunk(items=(item(0), item(1)), is_sure=True)
    singles = [replace(chunk, items=(item(index),), num_losses=2) for index in range(2)]

    assert chunk.after_loss() == ([replace(chunk, num_losses=1)], [])
    assert replace(chunk, num_losses=1).after_loss() == (singles, [])
    again, (failure,) = replace(singles[1], num_losses=MAX_LOSSES - 1).after_loss()
    assert (again, failure.index, failure.picture, failure.finish) == ([], 1, "1.png", "error")
    assert failure.error.code == "lost"


def test_workers_know_records_by_the_ids_that_the_driver_gives_them(tmp_path: Path) -> None:
    work, _ = planner_of().item(PictureInput(source="a.png", label="a.png"))

    for number in range(1, len(QUESTIONS) + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        known = known_after(folder, digest="cd" * 32, num_questions=number)
        left = [known.left(replace(work, questions=(question,)), "cd" * 32) for question in work.questions]
        assert left == [()] * number + [(question,) for question in work.questions[number:]]
        assert known.left(work, "cd" * 32) == (() if number == len(QUESTIONS) else work.questions)
        assert known.left(work, "ee" * 32) == work.questions
