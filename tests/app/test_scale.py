"""Jobs over many machines, as far as they need no Ray: what is handed out, what becomes of it, and where it runs."""

import pickle
import random
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.answers import Answer
from app.captioner import ModelInfo
from app.errors import Exit, Problem, UsageError
from app.inputs import PictureInput, QuestionFields
from app.jobs.desk import Desk
from app.jobs.questions import Question
from app.reading.reader import PictureReading
from app.records.file import RecordWriter
from app.records.index import RecordIndex
from app.records.settings import record_settings
from app.scale.chunks import MAX_PICTURES, AnsweredChunk, Chunk, Known, ReadChunk, in_chunks, sizes
from app.scale.cluster import joined_cluster
from app.scale.drive import Drive, check_alike, loaded
from app.scale.ledger import MAX_LOSSES, Ledger
from app.scale.options import RayOptions, WorkersFailedError
from app.scale.places import Machine, num_reading_tasks, plan_places
from app.scale.reading import Reading, read_chunk
from app.scale.worker import LoadedModel, NotLoaded
from app.spec import CaptionerSpec
from app.work import WorkItem, WorkQuestion
from llm.engine.sampling_params import SamplingParams
from tests.app.golden import picture

INFO = ModelInfo(
    name="tiny",
    digest="ab" * 32,
    device="cpu",
    dtype="float32",
    precision="float",
    vision="torch",
    mode="eager",
    operators="aten",
    encoder=None,
    context=64,
    default_prompt="Describe it",
)
SPEC = CaptionerSpec(batch_size=8)
SAMPLING = SamplingParams()
FIRST = LoadedModel(host="here", process=1, spec=SPEC, info=INFO, image_size=32)


def item(index: int, *, size: int | None = None) -> WorkItem:
    source: str | bytes = f"{index}.png" if size is None else bytes(size)
    return WorkItem(picture=source, label=f"{index}.png", questions=(WorkQuestion(index=index, prompt="What?"),))


# Chunks


def test_chunks_grow_so_that_no_worker_waits_for_its_first() -> None:
    groups = list(in_chunks(map(item, range(500)), sizes(8, num_alike=4)))

    assert [len(group) for group in groups] == [8] * 4 + [16] * 4 + [32] * 4 + [64] * 4 + [20]
    assert [one.label for group in groups for one in group] == [f"{index}.png" for index in range(500)]


def test_large_batches_do_not_make_larger_chunks() -> None:
    assert next(sizes(1000, num_alike=1)) == MAX_PICTURES


def test_pictures_that_come_as_bytes_make_smaller_chunks() -> None:
    groups = list(in_chunks((item(index, size=20 * 2**20) for index in range(5)), sizes(64, num_alike=1)))

    assert [len(group) for group in groups] == [2, 2, 1]


# The ledger


def test_a_chunk_is_settled_once() -> None:
    ledger = Ledger()
    chunk = ledger.enter([item(0)])

    assert ledger.settle(chunk.number) == chunk
    assert ledger.settle(chunk.number) is None
    assert len(ledger) == 0


def test_what_is_lost_is_tried_picture_by_picture_and_fails_in_the_end() -> None:
    ledger = Ledger()
    ledger.enter([item(0), item(1)], is_sure=True)

    singles, failures = ledger.enter_lost()

    assert [(chunk.items, chunk.is_sure, chunk.num_losses) for chunk in singles] == [
        ((item(0),), True, 1),
        ((item(1),), True, 1),
    ]
    assert failures == []
    ledger.settle(singles[0].number)
    for _ in range(MAX_LOSSES - 1):
        singles, failures = ledger.enter_lost()
    assert singles == []
    assert [(answer.index, answer.picture, answer.finish) for answer in failures] == [(1, "1.png", "error")]
    assert failures[0].error is not None
    assert failures[0].error.code == "lost"


# Where captioners go


def machine(name: str, **resources: float) -> Machine:
    return Machine(id=name, resources=resources)


def test_every_device_has_a_captioner_on_its_machine() -> None:
    cluster = [machine("head", CPU=4), machine("a", CPU=16, GPU=2), machine("b", CPU=16, GPU=1)]

    places = plan_places(cluster, device="gpu-like:3", actors=None)

    assert [(place.machine, place.devices, place.device) for place in places] == [
        ("a", {"GPU": 1.0}, "gpu-like"),
        ("a", {"GPU": 1.0}, "gpu-like"),
        ("b", {"GPU": 1.0}, "gpu-like"),
    ]


def test_a_device_that_ray_knows_by_its_own_name_is_reserved_by_it() -> None:
    places = plan_places([machine("a", CPU=8, XPU=2, GPU=1)], device="xpu", actors=None)

    assert [place.devices for place in places] == [{"XPU": 1.0}] * 2


def test_without_devices_every_machine_with_processors_has_one_captioner() -> None:
    cluster = [machine("head", CPU=0), machine("a", CPU=8), machine("b", CPU=2)]

    places = plan_places(cluster, device="cpu", actors=None)

    assert [(place.machine, place.num_cpus, place.threads) for place in places] == [("a", 7.0, 8), ("b", 1.0, 2)]


@pytest.mark.parametrize("cpus", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("actors", [1, 2, 3, 5, 16])
def test_captioners_leave_room_for_readers_on_every_machine(cpus: int, actors: int) -> None:
    cluster = [machine("a", CPU=cpus), machine("b", CPU=cpus)]

    places = plan_places(cluster, device="cpu", actors=actors)

    assert len(places) == actors
    reserved = Counter[str]()
    for place in places:
        reserved[place.machine] += place.num_cpus  # type: ignore[assignment]
        assert place.num_cpus <= 1 or place.num_cpus == int(place.num_cpus)  # what Ray takes
        assert place.threads is not None
        assert place.threads >= 1
    assert max(reserved.values()) <= cpus - 0.5
    assert max(Counter(place.machine for place in places).values()) == -(-actors // 2)


def test_auto_takes_devices_where_there_are_some() -> None:
    with_devices = [machine("a", CPU=8, GPU=1), machine("b", CPU=8)]

    assert [place.machine for place in plan_places(with_devices, device="auto", actors=None)] == ["a"]
    assert [place.device for place in plan_places([machine("b", CPU=8)], device="auto", actors=None)] == ["cpu"]


@pytest.mark.parametrize(("device", "actors"), [("gpu-like", None), ("gpu-like", 2)])
def test_a_device_that_the_cluster_has_not_is_a_usage_error(device: str, actors: int | None) -> None:
    cluster = [machine("a", CPU=8)] if actors is None else [machine("a", CPU=8, GPU=1)]

    with pytest.raises(UsageError) as caught:
        plan_places(cluster, device=device, actors=actors)

    assert caught.value.hint


def test_readers_are_as_many_as_captioners_can_use_and_take_half_of_the_processors() -> None:
    assert num_reading_tasks([machine("a", CPU=64)], num_captioners=2) == 8
    assert num_reading_tasks([machine("a", CPU=8)], num_captioners=8) == 4
    assert num_reading_tasks([machine("a", CPU=1)], num_captioners=1) == 2


@pytest.mark.parametrize(("actors", "address"), [(0, None), (None, "ray://head:10001")])
def test_options_that_cannot_be_meant_are_refused(actors: int | None, address: str | None) -> None:
    with pytest.raises(ValueError, match=r"actors|ray_address"):
        RayOptions(actors=actors, address=address)


# What a worker leaves out


QUESTIONS = (
    Question(),
    Question(instruction="Is it {stem}?", choices=("yes", "no")),
    Question(instruction="Look", input="closely"),
    Question(raw="A picture of"),
)


def desk_of(earlier: RecordIndex | None = None, *, retry_errors: bool = False) -> Desk:
    return Desk(
        QUESTIONS, spec=SPEC, info=INFO, sampling=SAMPLING, run="run", earlier=earlier, retry_errors=retry_errors
    )


def answer_to(question: WorkQuestion, label: str, digest: str) -> Answer:
    return Answer(
        index=question.index, picture=label, digest=digest, prompt="", text="a", token_ids=(1,), finish="stop"
    )


def known_of(index: RecordIndex) -> Known:
    settings = record_settings(SPEC, info=INFO, sampling=SAMPLING, choices=None)
    return Known(index=index, model_digest=INFO.digest, settings=settings, retry_errors=False)


def known_after(folder: Path, *, digest: str, num_questions: int) -> Known:
    """What workers know after a run that answered some questions about a.png."""
    desk = desk_of()
    work, _ = desk.item(PictureInput(source="a.png", label="a.png"))
    with RecordWriter(folder / "answers.jsonl") as file:
        for question in work.questions[:num_questions]:
            answer = answer_to(question, "a.png", digest)
            file.write(desk.record(answer, desk.asked(answer)))
    return known_of(RecordIndex(folder / "answers.jsonl"))


def test_workers_know_records_by_the_ids_that_the_driver_gives_them(tmp_path: Path) -> None:
    work, _ = desk_of().item(PictureInput(source="a.png", label="a.png"))

    for number in range(1, len(QUESTIONS) + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        known = known_after(folder, digest="cd" * 32, num_questions=number)
        seen = [known.has(replace(work, questions=(question,)), "cd" * 32) for question in work.questions]
        assert seen == [True] * number + [False] * (len(QUESTIONS) - number)
        assert known.has(work, "cd" * 32) == (number == len(QUESTIONS))
        assert not known.has(work, "ee" * 32)


READING = Reading(spec=SPEC, size=32, kind="thread", timeout_s=10.0, folder=".")


def read(chunk: Chunk, *, known: Known | None = None) -> ReadChunk:
    done: ReadChunk = pickle.loads(read_chunk(pickle.dumps(chunk), reading=READING, known=known))
    return done


def test_a_chunk_is_read_and_what_is_wrong_with_a_picture_is_in_its_place(tmp_path: Path) -> None:
    shutil.copy(picture("noise_128x96.png"), tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    unnamed = PictureReading(digest="", pixels=None, error=None, elapsed_ms=0.0)
    items = [replace(item(index), picture=str(tmp_path / name)) for index, name in enumerate(("good.png", "bad.png"))]

    done = read(Chunk(number=7, items=(*items, replace(item(2), picture=unnamed))))

    assert (done.number, done.problem) == (7, None)
    good, bad, other = (one.picture for one in done.items)
    assert isinstance(good, PictureReading)
    assert good.pixels is not None
    assert good.pixels.shape == (32, 32, 3)
    assert isinstance(bad, PictureReading)
    assert bad.error is not None
    assert bad.error.code == "not_a_picture"
    assert other == unnamed
    assert [one.questions for one in done.items] == [one.questions for one in (*items, item(2))]


def test_pictures_that_are_answered_are_hashed_and_no_more(tmp_path: Path) -> None:
    shutil.copy(picture("noise_128x96.png"), tmp_path / "a.png")
    work, _ = desk_of().item(PictureInput(source=str(tmp_path / "a.png"), label="a.png"))
    chunk = Chunk(number=0, items=(work,))
    (looked,) = read(chunk).items
    assert isinstance(looked.picture, PictureReading)
    known = known_after(tmp_path, digest=looked.picture.digest, num_questions=len(QUESTIONS))

    (left_out,) = read(chunk, known=known).items
    (sure,) = read(replace(chunk, is_sure=True), known=known).items

    assert isinstance(left_out.picture, PictureReading)
    assert left_out.picture.is_only_digest
    assert left_out.picture.digest == looked.picture.digest
    assert isinstance(sure.picture, PictureReading)
    assert sure.picture.pixels is not None


# The loop


class FakeReaders:
    """Reads at once; loses some chunks, and fails at some windows."""

    def __init__(self, chance: random.Random, *, loss: float, known: Known | None = None) -> None:
        self.num_pending = 0
        self._chance, self._loss, self._known = chance, loss, known
        self._ready: deque[Any] = deque()

    def add(self, window: Sequence[Chunk]) -> None:
        self.num_pending += 1
        chunks = list(window)
        self._chance.shuffle(chunks)
        self._ready.extend(chunk for chunk in chunks if self._chance.random() >= self._loss)
        self._ready.append(None)

    def take(self, *, timeout_s: float) -> Chunk | None:
        while self._ready and self._ready[0] is None:
            self._ready.popleft()
            self.num_pending -= 1
        return self._ready.popleft() if self._ready else None


class FakeCrew:
    """Answers in any order; loses some chunks, answers some twice, and dies of poison."""

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

    def give(self, chunk: Chunk) -> None:
        self._in_hand.append(chunk)

    def give_returned(self) -> None:
        pass

    def take_news(self) -> list[str]:
        return []

    def wait(self, timeout_s: float) -> Iterator[AnsweredChunk]:
        if not self._in_hand:
            return
        chunk = self._chance.choice(self._in_hand)
        is_repeat = self._chance.random() < self._loss
        if not is_repeat:
            self._in_hand.remove(chunk)
        is_poisoned = any(question.index in self._poison for one in chunk.items for question in one.questions)
        if is_poisoned or (not is_repeat and self._chance.random() < self._loss):
            return
        left_out = set()
        answers = []
        for position, one in enumerate(chunk.items):
            digest = f"digest of {one.label}"
            if self._known is not None and not chunk.is_sure and self._known.has(one, digest):
                left_out.add(position)
                continue
            self.num_answered[one.label] += 1
            answers += [answer_to(question, one.label, digest) for question in one.questions]
        yield AnsweredChunk(
            number=chunk.number,
            digests=tuple(f"digest of {one.label}" for one in chunk.items),
            answers=tuple(answers),
            left_out=frozenset(left_out),
        )


class FakeScribe:
    def __init__(self, desk: Desk, file: RecordWriter) -> None:
        self._desk, self._file = desk, file
        self.answers: list[Answer] = []

    def write(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._file.write(self._desk.record(answer, self._desk.asked(answer)))

    def say(self, text: str) -> None:
        pass


def run_job(
    folder: Path, names: Sequence[str], *, seed: int, loss: float = 0.0, poison: frozenset[int] = frozenset()
) -> tuple[list[Answer], Desk, FakeCrew]:
    """A job over pictures of these names that resumes what is in the folder's records."""
    chance = random.Random(seed)
    with RecordWriter(folder / "answers.jsonl") as file:
        index = RecordIndex(file.path) or None
        known = None if index is None else known_of(RecordIndex(file.path))
        desk = desk_of(index)
        scribe, crew = FakeScribe(desk, file), FakeCrew(chance, loss=loss, poison=poison, known=known)
        readers: Any = FakeReaders(chance, loss=loss)
        fakes: Any = crew, readers, desk, scribe
        drive = Drive(*fakes, first=FIRST, has_earlier=known is not None)
        items = (desk.item(PictureInput(source=name, label=name))[0] for name in names)
        drive.run(in_chunks(items, sizes(4, num_alike=2)), stop=lambda: False)
    return scribe.answers, desk, crew


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loss", [0.0, 0.05, 0.3])
def test_every_question_has_one_answer_whatever_is_lost_or_repeated(tmp_path: Path, seed: int, loss: float) -> None:
    names = [f"{number}.png" for number in range(150)]

    answers, _, _ = run_job(tmp_path, names, seed=seed, loss=loss)

    assert sorted(answer.index for answer in answers) == list(range(150 * len(QUESTIONS)))
    codes = Counter(answer.error and answer.error.code for answer in answers)
    assert set(codes) <= {None, "lost"}
    assert loss > 0 or set(codes) == {None}


def test_a_picture_that_ends_every_worker_costs_no_other(tmp_path: Path) -> None:
    names = [f"{number}.png" for number in range(100)]

    answers, _, _ = run_job(tmp_path, names, seed=1, poison=frozenset({40}))

    failed = {answer.picture for answer in answers if answer.error is not None}
    assert failed == {"10.png"}
    assert len(answers) == 100 * len(QUESTIONS)


@pytest.mark.parametrize("seed", range(4))
def test_a_further_run_answers_what_is_new_and_nothing_else(tmp_path: Path, seed: int) -> None:
    old = [f"{number}.png" for number in range(60)]
    new = [f"{number}.png" for number in range(30, 100)]
    run_job(tmp_path, old, seed=seed)

    answers, desk, crew = run_job(tmp_path, new, seed=seed)

    assert Counter(answer.picture for answer in answers) == Counter(new[30:] * len(QUESTIONS))
    assert desk.num_known == 30 * len(QUESTIONS)
    assert set(crew.num_answered) == set(new[30:])


def test_a_picture_that_is_named_twice_is_answered_twice_and_known_twice(tmp_path: Path) -> None:
    run_job(tmp_path, ["a.png"], seed=0)

    # The worker believes that both are answered; the driver knows of one record only.
    answers, desk, _ = run_job(tmp_path, ["a.png", "a.png"], seed=0)
    again, desk_after, _ = run_job(tmp_path, ["a.png", "a.png"], seed=0)

    assert (len(answers), desk.num_known) == (len(QUESTIONS), len(QUESTIONS))
    assert (len(again), desk_after.num_known) == (0, 2 * len(QUESTIONS))


def test_once_stopped_nothing_more_is_begun(tmp_path: Path) -> None:
    chance = random.Random(0)
    with RecordWriter(tmp_path / "answers.jsonl") as file:
        desk = desk_of()
        scribe = FakeScribe(desk, file)
        fakes: Any = FakeCrew(chance, loss=0.0), FakeReaders(chance, loss=0.0), desk, scribe
        items = (desk.item(PictureInput(source=f"{number}", label=f"{number}"))[0] for number in range(1000))
        Drive(*fakes, first=FIRST, has_earlier=False).run(
            in_chunks(items, sizes(8, num_alike=1000)), stop=lambda: len(scribe.answers) > 100
        )

    assert 100 < len(scribe.answers) <= (100 // (8 * len(QUESTIONS)) + 1 + 4) * 8 * len(QUESTIONS)
    assert len(scribe.answers) == len({answer.index for answer in scribe.answers})


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(Exit.USAGE, UsageError), (Exit.FAILED, WorkersFailedError)], ids=["usage", "failed"]
)
def test_what_goes_wrong_on_a_machine_is_told_with_its_name(exit_code: Exit, kind: type[Exception]) -> None:
    problem = Problem(exit_code=exit_code, http_status=500, sentence="It broke", hint="mend it")

    with pytest.raises(kind, match="On there: It broke") as caught:
        loaded(NotLoaded(host="there", problem=problem))

    assert getattr(caught.value, "hint", None) == "mend it"


def test_captioners_of_different_models_do_not_work_together() -> None:
    other = replace(FIRST, host="there", info=replace(INFO, digest="cd" * 32))

    check_alike(replace(FIRST, host="there"), FIRST)
    with pytest.raises(WorkersFailedError, match="there is another than on here"):
        check_alike(other, FIRST)


def test_a_manifests_own_question_is_known_by_its_id(tmp_path: Path) -> None:
    own = PictureInput(source="a.png", label="a.png", questions=(QuestionFields(instruction="Is it red?"),))
    desk = desk_of()
    work, _ = desk.item(own)
    answer = answer_to(work.questions[0], "a.png", "cd" * 32)
    with RecordWriter(tmp_path / "answers.jsonl") as file:
        file.write(desk.record(answer, desk.asked(answer)))

    known = known_of(RecordIndex(tmp_path / "answers.jsonl"))

    assert known.has(work, "cd" * 32)


def test_without_ray_the_user_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UsageError, match="needs the package ray") as caught, joined_cluster(RayOptions()):
        pass

    assert ".[ray]" in caught.value.hint
