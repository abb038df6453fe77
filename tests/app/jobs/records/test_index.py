"""Answered pictures are recognised: under their name, under a new name, and only once."""

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llama_adapter.app.jobs.exports.survey import Selection, survey
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.index import Claim, Moves, RecordIndex
from llama_adapter.app.jobs.records.record import Record, moved_record
from tests.app.recorded import failed, recorded

ID = recorded()["id"]  # the id of all pictures with the same bytes


def index_of(path: Path, *records: Record) -> RecordIndex:
    with RecordWriter(path / "answers.jsonl") as writer:
        for record in records:
            writer.write(record)
    return RecordIndex([path / "answers.jsonl"])


def state(index: RecordIndex, record_id: str, picture: str, *, path: str | None = None) -> str | None:
    claim = index.claim(record_id, picture, path=path)
    return None if claim is None else claim.state


RAW = os.fsdecode(b"a\xff.png")


@pytest.mark.parametrize(
    ("name", "files", "claims"),
    [
        ("a.png", [], [("a.png", "answered"), ("a.png", None)]),  # a picture that is named twice gets two records
        ("old/name.png", ["new.png"], [("new.png", "answered")]),  # renamed or moved
        ("a.png", ["a.png"], [("../{folder}/a.png", "answered")]),  # the same path in another spelling
        # A copy in the same folder: b.png was answered before the run was killed, and a.png now comes first.
        ("b.png", ["b.png", "a.png"], [("a.png", None), ("b.png", "answered")]),
        (RAW, [RAW, "b.png"], [("b.png", None), (RAW, "answered")]),
        ("shard.tar/b.png", ["shard.tar"], [("shard.tar/a.png", None), ("shard.tar/b.png", "answered")]),
        ("s3://bucket/a.png", [], [("s3://bucket/b.png", None), ("s3://bucket/a.png", "answered")]),
        ("lone \udc80 surrogate.png", [], [("lone \udc80 surrogate.png", "answered")]),
        ("\ud800/null \0.png", ["new.png"], [("new.png", "answered")]),  # no file can have this name
        (r"inv\xff.png", [], [(r"inv\xff.png", "answered")]),
        (r"shard.tar/a\xff.png", ["shard.tar"], [(f"shard.tar/{RAW}", None), (r"shard.tar/a\xff.png", "answered")]),
    ],
)
def test_a_record_is_claimed_by_its_picture(
    name: str, files: list[str], claims: list[tuple[str, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in files:
        Path(file).touch()
    index = index_of(tmp_path, recorded(picture=name))

    for claimed, expected in claims:
        picture = claimed.format(folder=tmp_path.name)
        assert state(index, ID, picture, path=picture if os.path.exists(picture) else None) == expected
    assert state(index, "00" * 16, name) is None


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_in_the_same_folder_gets_its_own_answer(link: Callable[..., None], tmp_path: Path) -> None:
    first, second = str(tmp_path / "a.png"), str(tmp_path / "b.png")
    Path(second).touch()
    link(second, first)
    index = index_of(tmp_path, recorded(picture=second))

    assert [state(index, ID, name, path=name) for name in (first, second)] == [None, "answered"]


def test_look_up_claims_nothing_and_reads_no_file_and_a_failure_is_claimed_unless_it_was_answered_later(
    tmp_path: Path,
) -> None:
    bad, mended = failed(picture="bad.png", id="bb" * 16), recorded(picture="mended.png", id="cc" * 16)
    raw = recorded(picture="a\udcff.png")
    index = index_of(tmp_path, bad, failed(picture="mended.png", id="cc" * 16), mended, raw)
    (tmp_path / "answers.jsonl").unlink()

    for _ in range(2):
        assert index.look_up("bb" * 16, "bad.png") == "failed"
        assert index.look_up("cc" * 16, "mended.png") == "answered"
        assert index.look_up(ID, "a\udcff.png") == "answered"
        assert index.look_up(ID, "a\udcfe.png") == "elsewhere"  # undecoded bytes distinguish names
        assert index.look_up("00" * 16, "bad.png") is None
    assert state(index, "bb" * 16, "bad.png") == "failed"
    assert [state(index, "cc" * 16, "mended.png") for _ in range(2)] == ["answered", None]


def test_a_failure_of_a_later_run_outdates_an_answer_until_it_is_answered_again(tmp_path: Path) -> None:
    record, own, missing = recorded(picture="a.png"), failed(picture="a.png"), failed(picture="a.png", run="run-2")

    def is_outdated(*records: Record) -> bool:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return index_of(path, *records).has_failed_since(ID, "a.png", failure_id=missing["id"])

    assert is_outdated(record, missing)
    assert not is_outdated(missing, record)
    assert not is_outdated(record, missing, record)
    assert not is_outdated(record, own)  # the failure of another picture with this name, in the same run
    assert not is_outdated(record, failed(picture="b.png", run="run-2"))
    assert is_outdated(missing)
    assert is_outdated(recorded(picture="moved.png"), missing)


@pytest.mark.parametrize("how", ["moved_from", "supersedes"])
def test_what_a_record_replaces_is_found_by_its_exact_name(how: str, tmp_path: Path) -> None:
    literal, real, other = (str(tmp_path / name) for name in (r"9.41\u202fAM.png", "9.41\u202fAM.png", "b.png"))
    for path in (real, other):  # of the literal name, which reads like an escape of the real one, there is no file
        Path(path).touch()
    replacing = recorded(picture=other, run="run-2")
    replacing |= {"moved_from": literal} if how == "moved_from" else {"supersedes": [literal]}

    index = index_of(tmp_path, *(failed(picture=name, id=ID) for name in (real, literal)), replacing)

    assert [index.has_failed(name) for name in (literal, real)] == [False, True]
    assert state(index, ID, literal) is None
    assert [state(index, ID, real, path=real) for _ in range(2)] == ["failed", None]
    found = survey([str(tmp_path / "answers.jsonl")], Selection())
    assert [record["picture"] for record in found.records()] == [real, other]


def test_it_agrees_with_a_multiset_over_many_records(tmp_path: Path) -> None:
    draw = random.Random(1)

    def key() -> tuple[str, str]:  # remote names, because their records never stand for a picture with another name
        return f"{draw.randrange(40):032x}", f"s3://bucket/{draw.randrange(4)}.png"

    keys = [key() for _ in range(300)]
    index = index_of(tmp_path, *[recorded(id=record_id, picture=picture) for record_id, picture in keys])
    left = Counter(keys)

    for record_id, picture in [key() for _ in range(600)]:
        expected = "answered" if left[record_id, picture] else None
        left[record_id, picture] -= bool(expected)
        assert state(index, record_id, picture) == expected


def test_a_record_of_a_moved_picture_replaces_the_one_under_the_former_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.png").touch()
    former = recorded(picture="old.png")
    claim = index_of(tmp_path, former).claim(ID, "new.png", path="new.png")
    assert claim == Claim("answered", former)
    assert index_of(tmp_path, former).claim(ID, "new.tar/a.png") == Claim("answered", None)  # a member is not moved
    moved = moved_record(former, picture="new.png")
    again = index_of(tmp_path, former, moved).claim(ID, "new.png", path="new.png")
    assert again == Claim("answered", None)

    Path("new.png").rename("old.png")  # moved back: the record under the first name is not taken, but the last one
    assert index_of(tmp_path, former, moved).claim(ID, "old.png", path="old.png") == Claim("answered", moved)
    back = moved_record(moved, picture="old.png")
    assert index_of(tmp_path, former, moved, back).claim(ID, "old.png", path="old.png") == Claim("answered", None)

    Path("new.png").touch()  # a copy: the record under its name was replaced
    assert state(index_of(tmp_path, former, moved, back), ID, "new.png", path="new.png") is None


def test_thousands_of_moves_are_found_as_a_loop_finds_them() -> None:
    random.seed(5)
    keys = [(random.randrange(20), random.randrange(5)) for _ in range(2_000)]
    moved = {row: (random.randrange(20), random.randrange(5)) for row in random.sample(range(2_000), 30)}
    moves = Moves()
    for row, key in sorted(moved.items()):
        moves.add(row, *key)

    are_replaced = moves.are_replaced(*(np.array(part, dtype=np.uint64) for part in zip(*keys, strict=True)))
    assert are_replaced.tolist() == [
        any(key == own and row > position for row, key in moved.items()) for position, own in enumerate(keys)
    ]
