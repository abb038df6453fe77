"""The loop of a job on many machines, and its chunks: every question gets one answer."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.jobs.clusters.actors import LostChunk
from llama_adapter.app.jobs.clusters.chunks import (
    MAX_LOSSES,
    MAX_PICTURES,
    AnsweredChunk,
    Chunk,
    Known,
    in_chunks,
    sizes,
)
from llama_adapter.app.jobs.clusters.cluster import WorkersFailedError
from llama_adapter.app.jobs.clusters.drive import MAX_LOST_READINGS, Drive, check_alike, loaded
from llama_adapter.app.jobs.clusters.worker import NotLoaded
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import Problem
from tests.app.jobs.clusters.made import FIRST, INFO, QUESTIONS, answer_to, item, known_after, planner_of, record_of

# Chunks of work: their sizes, what workers may leave out, and what follows a loss


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


# The loop, even if work is lost, repeated or already known


def has_any(chunk: Chunk, indices: frozenset[int]) -> bool:
    """Whether a chunk has a question with one of these indices."""
    return any(question.index in indices for one in chunk.items for question in one.questions)


class FakeReaders:
    """Reads at once, in any order. It loses all chunks that have a poisoned question."""

    def __init__(self, chance: random.Random, *, poison: frozenset[int] = frozenset()) -> None:
        self._chance, self._poison = chance, poison
        self._ready: list[Chunk] = []

    @property
    def num_pending(self) -> int:
        return len(self._ready)

    @property
    def can_take(self) -> bool:
        return len(self._ready) < 8

    def add(self, chunk: Chunk) -> None:
        self._ready.insert(self._chance.randint(0, len(self._ready)), chunk)

    def take(self, *, timeout_s: float) -> tuple[Chunk, Chunk | Exception | None] | None:
        return (chunk := self._ready.pop(), self.read(chunk)) if self._ready else None

    def read(self, chunk: Chunk) -> Chunk | Exception | None:
        """What comes of reading a chunk; None if its process is lost."""
        return None if has_any(chunk, self._poison) else chunk


class FakeCrew:
    """Answers in any order. It loses some chunks, and all that have a poisoned question."""

    def __init__(
        self, chance: random.Random, *, loss: float, poison: frozenset[int] = frozenset(), known: Known | None = None
    ) -> None:
        self.num_ready, self.num_answered = 2, Counter[str]()
        self._chance, self._loss, self._poison, self._known = chance, loss, poison, known
        self._in_hand: list[Chunk] = []

    @property
    def num_in_hand(self) -> int:
        return len(self._in_hand)

    @property
    def can_take(self) -> bool:
        return len(self._in_hand) < 4

    def give(self, chunk: Chunk, read: Chunk) -> None:
        self._in_hand.append(chunk)

    def wait(self, timeout_s: float) -> Iterator[tuple[Chunk, AnsweredChunk] | LostChunk]:
        if self._in_hand:
            yield self.answer(self._in_hand.pop(self._chance.randrange(len(self._in_hand))))

    def answer(self, chunk: Chunk) -> tuple[Chunk, AnsweredChunk] | LostChunk:
        if has_any(chunk, self._poison) or self._chance.random() < self._loss:
            return LostChunk(chunk, may_be_cause=True)
        answers = []
        for one in chunk.items:
            digest = f"digest of {one.label}"
            if self._known is not None and not chunk.is_sure and not self._known.left(one, digest):
                continue
            self.num_answered[one.label] += 1
            answers += [answer_to(question, one.label, digest) for question in one.questions]
        digests = tuple(f"digest of {one.label}" for one in chunk.items)
        return chunk, AnsweredChunk(digests=digests, answers=tuple(answers))


def numbered(*span: int) -> list[str]:
    """Names of pictures."""
    return [f"{number}.png" for number in range(*span)]


def run_job(
    folder: Path,
    names: Sequence[str],
    *,
    seed: int,
    loss: float = 0.0,
    poison: frozenset[int] = frozenset(),
    unreadable: frozenset[int] = frozenset(),
) -> tuple[list[Answer], JobPlanner, FakeCrew]:
    """A job over pictures with these names that resumes the records in the folder."""
    chance = random.Random(seed)
    with RecordWriter(folder / "answers.jsonl") as file:
        index = RecordIndex([file.path]) or None
        known = None if index is None else Known(index=RecordIndex([file.path]), retry_errors=False)
        planner = planner_of(index)
        crew = FakeCrew(chance, loss=loss, poison=poison, known=known)
        fakes: Any = crew, FakeReaders(chance, poison=unreadable)
        drive = Drive(*fakes, planner, first=FIRST)
        items = (planner.item(PictureInput(source=name, label=name))[0] for name in names)
        answers = []
        for answer in drive.run(in_chunks(items, sizes(4, num_alike=2)), stop=lambda: False):
            answers.append(answer)
            file.write(record_of(answer))
    return answers, planner, crew


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", [0.0, 0.05, 0.3])
def test_every_question_has_one_answer_whatever_is_lost_or_repeated(tmp_path: Path, seed: int, loss: float) -> None:
    answers, _, _ = run_job(tmp_path, numbered(80), seed=seed, loss=loss)

    assert sorted(answer.index for answer in answers) == list(range(80 * len(QUESTIONS)))
    codes = Counter(answer.error and answer.error.code for answer in answers)
    assert set(codes) <= {None, "lost"}
    assert loss > 0 or set(codes) == {None}


@pytest.mark.parametrize("what", ["poison", "unreadable"])
def test_a_picture_that_ends_every_process_costs_no_other(what: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {what: frozenset({40})}
    answers, _, _ = run_job(tmp_path, numbered(100), seed=1, **options)

    failed = {(answer.picture, answer.error.code) for answer in answers if answer.error is not None}
    assert failed == {("10.png", "lost")}
    assert len(answers) == 100 * len(QUESTIONS)


def test_a_chunk_that_only_waited_for_others_that_were_lost_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, losses = FakeCrew.answer, iter(range(9))

    def lose(self: FakeCrew, chunk: Chunk) -> tuple[Chunk, AnsweredChunk] | LostChunk:
        return answer(self, chunk) if next(losses, None) is None else LostChunk(chunk, may_be_cause=False)

    monkeypatch.setattr(FakeCrew, "answer", lose)
    answers, _, _ = run_job(tmp_path, ["a.png"], seed=0)

    assert [answer.error for answer in answers] == [None] * len(QUESTIONS)


@pytest.mark.parametrize("seed", range(2))
def test_a_further_run_answers_what_is_new_and_nothing_else(tmp_path: Path, seed: int) -> None:
    new = numbered(30, 100)
    run_job(tmp_path, numbered(60), seed=seed)

    answers, planner, crew = run_job(tmp_path, new, seed=seed)

    assert Counter(answer.picture for answer in answers) == Counter(new[30:] * len(QUESTIONS))
    assert planner.num_known == 30 * len(QUESTIONS)
    assert set(crew.num_answered) == set(new[30:])


def test_a_picture_that_is_named_twice_is_answered_twice_and_known_twice(tmp_path: Path) -> None:
    run_job(tmp_path, ["a.png"], seed=0)

    # The worker considers both answered; the driver knows of only one record.
    answers, planner, _ = run_job(tmp_path, ["a.png", "a.png"], seed=0)
    again, planner_after, _ = run_job(tmp_path, ["a.png", "a.png"], seed=0)

    assert (len(answers), planner.num_known) == (len(QUESTIONS), len(QUESTIONS))
    assert (len(again), planner_after.num_known) == (0, 2 * len(QUESTIONS))


def test_a_worker_that_leaves_something_out_ends_the_job_and_what_it_answered_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: Any = FakeCrew.answer

    def forget(self: FakeCrew, chunk: Chunk) -> tuple[Chunk, AnsweredChunk]:
        _, came = answer(self, chunk)
        return chunk, replace(came, answers=came.answers[:-1], host="there")

    monkeypatch.setattr(FakeCrew, "answer", forget)

    with pytest.raises(WorkersFailedError, match="there left 1 of 16 questions about its pictures without an answer"):
        run_job(tmp_path, numbered(4), seed=0)

    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 4 * len(QUESTIONS) - 1


def test_readers_that_fail_again_and_again_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeReaders, "read", lambda self, chunk: ImportError("no module named llama_adapter"))

    with pytest.raises(WorkersFailedError, match=r"Pictures cannot be read on the machines.*no module named"):
        run_job(tmp_path, ["a.png"], seed=0)


def test_readers_that_are_lost_again_and_again_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Chunk] = []

    def lose(self: FakeReaders, chunk: Chunk) -> Chunk | None:
        taken.append(chunk)
        return chunk if len(taken) <= 5 else None

    monkeypatch.setattr(FakeReaders, "read", lose)

    with pytest.raises(WorkersFailedError, match=r"Pictures cannot be read on the machines.* in a row") as caught:
        run_job(tmp_path, numbered(100), seed=0)

    assert len(taken) == 5 + MAX_LOST_READINGS
    assert "memory" in caught.value.hint


@pytest.mark.parametrize(("num_good", "num_last"), [(0, 1), (1, 1), (30, 1), (4, 4)])
def test_pictures_that_end_readers_are_lost_alone_also_at_the_end_of_a_job(
    tmp_path: Path, num_good: int, num_last: int
) -> None:
    num_each, count = len(QUESTIONS), num_good + num_last
    last = frozenset(range(num_good * num_each, count * num_each))

    answers, _, _ = run_job(tmp_path, numbered(count), seed=0, unreadable=last)

    assert len(answers) == count * num_each
    failed = {answer.index: answer.error.code for answer in answers if answer.error is not None}
    assert failed == dict.fromkeys(last, "lost")


def test_once_stopped_nothing_more_is_begun(tmp_path: Path) -> None:
    chance = random.Random(0)
    planner, answers = planner_of(), list[Answer]()
    fakes: Any = FakeCrew(chance, loss=0.0), FakeReaders(chance)
    items = (planner.item(PictureInput(source=f"{number}", label=f"{number}"))[0] for number in range(1000))
    drive = Drive(*fakes, planner, first=FIRST)

    for answer in drive.run(in_chunks(items, sizes(8, num_alike=1000)), stop=lambda: len(answers) > 100):
        answers.append(answer)

    assert 100 < len(answers) <= (100 // (8 * len(QUESTIONS)) + 1 + 4) * 8 * len(QUESTIONS)
    assert len(answers) == len({answer.index for answer in answers})


@pytest.mark.parametrize(
    ("exit_code", "kind"),
    [(ExitCode.USAGE, UsageError), (ExitCode.FAILED, WorkersFailedError)],
    ids=["usage", "failed"],
)
def test_errors_of_a_machine_name_it(exit_code: ExitCode, kind: type[Exception]) -> None:
    problem = Problem(exit_code=exit_code, http_status=500, sentence="It broke", hint="mend it")

    with pytest.raises(kind, match="On there: It broke") as caught:
        loaded(NotLoaded(host="there", problem=problem))

    assert getattr(caught.value, "hint", None) == "mend it"


def test_captioners_of_different_models_do_not_work_together() -> None:
    check_alike(INFO, INFO, hosts=("there", "here"))
    with pytest.raises(WorkersFailedError, match="there is another than on here"):
        check_alike(replace(INFO, digest="cd" * 32), INFO, hosts=("there", "here"))
