"""The loop of a job: every question gets one answer, even if work is lost, repeated or already known."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.jobs.clusters.actors import LostChunk
from llama_adapter.app.jobs.clusters.chunks import AnsweredChunk, Chunk, Known, in_chunks, sizes
from llama_adapter.app.jobs.clusters.cluster import WorkersFailedError
from llama_adapter.app.jobs.clusters.drive import MAX_LOST_READINGS, Drive, check_alike, loaded
from llama_adapter.app.jobs.clusters.worker import NotLoaded
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.problems import Problem
from tests.app.jobs.clusters.made import FIRST, INFO, QUESTIONS, answer_to, planner_of, record_of


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
        if not self._ready:
            return None
        chunk = self._ready.pop()
        return chunk, None if has_any(chunk, self._poison) else chunk


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
        if not self._in_hand:
            return
        chunk = self._in_hand.pop(self._chance.randrange(len(self._in_hand)))
        if has_any(chunk, self._poison) or self._chance.random() < self._loss:
            yield LostChunk(chunk, may_be_cause=True)
            return
        answers = []
        for one in chunk.items:
            digest = f"digest of {one.label}"
            if self._known is not None and not chunk.is_sure and not self._known.left(one, digest):
                continue
            self.num_answered[one.label] += 1
            answers += [answer_to(question, one.label, digest) for question in one.questions]
        digests = tuple(f"digest of {one.label}" for one in chunk.items)
        yield chunk, AnsweredChunk(digests=digests, answers=tuple(answers))


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
    names = [f"{number}.png" for number in range(80)]

    answers, _, _ = run_job(tmp_path, names, seed=seed, loss=loss)

    assert sorted(answer.index for answer in answers) == list(range(80 * len(QUESTIONS)))
    codes = Counter(answer.error and answer.error.code for answer in answers)
    assert set(codes) <= {None, "lost"}
    assert loss > 0 or set(codes) == {None}


@pytest.mark.parametrize("what", ["poison", "unreadable"])
def test_a_picture_that_ends_every_process_costs_no_other(what: str, tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(100)]

    options: dict[str, Any] = {what: frozenset({40})}
    answers, _, _ = run_job(tmp_path, names, seed=1, **options)

    failed = {(answer.picture, answer.error.code) for answer in answers if answer.error is not None}
    assert failed == {("10.png", "lost")}
    assert len(answers) == 100 * len(QUESTIONS)


def test_a_chunk_that_only_waited_for_others_that_were_lost_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, losses = FakeCrew.wait, iter(range(9))

    def losing(self: FakeCrew, timeout_s: float) -> Iterator[tuple[Chunk, AnsweredChunk] | LostChunk]:
        if self._in_hand and next(losses, None) is not None:
            yield LostChunk(self._in_hand.pop(), may_be_cause=False)
        else:
            yield from wait(self, timeout_s)

    monkeypatch.setattr(FakeCrew, "wait", losing)
    answers, _, _ = run_job(tmp_path, ["a.png"], seed=0)

    assert [answer.error for answer in answers] == [None] * len(QUESTIONS)


@pytest.mark.parametrize("seed", range(2))
def test_a_further_run_answers_what_is_new_and_nothing_else(tmp_path: Path, seed: int) -> None:
    old = [f"{number}.png" for number in range(60)]
    new = [f"{number}.png" for number in range(30, 100)]
    run_job(tmp_path, old, seed=seed)

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
    wait = FakeCrew.wait

    def forgetting(self: FakeCrew, timeout_s: float) -> Iterator[tuple[Chunk, AnsweredChunk]]:
        for chunk, came in wait(self, timeout_s):
            yield chunk, replace(came, answers=came.answers[:-1], host="there")

    monkeypatch.setattr(FakeCrew, "wait", forgetting)

    with pytest.raises(WorkersFailedError, match="there left 1 of 16 questions about its pictures without an answer"):
        run_job(tmp_path, [f"{number}.png" for number in range(4)], seed=0)

    with open(tmp_path / "answers.jsonl", encoding="utf-8") as file:
        assert len(file.readlines()) == 4 * len(QUESTIONS) - 1


def test_readers_that_fail_again_and_again_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = FakeReaders.take

    def fail(self: FakeReaders, *, timeout_s: float) -> tuple[Chunk, Exception] | None:
        taken = take(self, timeout_s=timeout_s)
        return taken and (taken[0], ImportError("no module named llama_adapter"))

    monkeypatch.setattr(FakeReaders, "take", fail)

    with pytest.raises(WorkersFailedError, match=r"Pictures cannot be read on the machines.*no module named"):
        run_job(tmp_path, ["a.png"], seed=0)


def test_readers_that_are_lost_again_and_again_end_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take, num_read, num_lost = FakeReaders.take, 5, 0

    def lose(self: FakeReaders, *, timeout_s: float) -> tuple[Chunk, Chunk | Exception | None] | None:
        nonlocal num_read, num_lost
        taken = take(self, timeout_s=timeout_s)
        if taken is None or num_read:
            num_read -= taken is not None
            return taken
        num_lost += 1
        return taken[0], None

    monkeypatch.setattr(FakeReaders, "take", lose)

    with pytest.raises(WorkersFailedError, match=r"Pictures cannot be read on the machines.* in a row") as caught:
        run_job(tmp_path, [f"{number}.png" for number in range(100)], seed=0)

    assert num_lost == MAX_LOST_READINGS
    assert "memory" in caught.value.hint


@pytest.mark.parametrize(("num_good", "num_last"), [(0, 1), (1, 1), (30, 1), (4, 4)])
def test_pictures_that_end_readers_are_lost_alone_also_at_the_end_of_a_job(
    tmp_path: Path, num_good: int, num_last: int
) -> None:
    num_each, count = len(QUESTIONS), num_good + num_last
    last = frozenset(range(num_good * num_each, count * num_each))

    answers, _, _ = run_job(tmp_path, [f"{number}.png" for number in range(count)], seed=0, unreadable=last)

    assert len(answers) == count * num_each
    assert {answer.index for answer in answers if answer.error is not None} == last
    assert {answer.error.code for answer in answers if answer.error is not None} == {"lost"}


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
