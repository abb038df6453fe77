"""What is answered already is found again: under its name, under a new one, and only once."""

import os
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llama_adapter.app.records.file import RecordWriter
from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.picture_names import escaped_name
from llama_adapter.app.records.record import Record
from tests.app.recorded import FakeAnswer, FakeError, recorded


def answered(picture: str, digest: str = "aa" * 32) -> Record:
    return recorded(FakeAnswer(picture=picture, digest=digest))


def failed(picture: str, digest: str = "aa" * 32, *, run: str = "run-1") -> Record:
    answer = FakeAnswer(picture=picture, digest=digest, error=FakeError(code="truncated", message="half"))
    return recorded(answer, run=run)


def escaped(record: Record) -> Record:
    """The record as earlier versions wrote it."""
    return {**record, "picture": escaped_name(record["picture"])}


def index_of(path: Path, *records: Record) -> RecordIndex:
    with RecordWriter(path / "answers.jsonl") as writer:
        for record in records:
            writer.write(record)
    return RecordIndex([path / "answers.jsonl"])


def test_a_record_is_found_under_its_name_once(tmp_path: Path) -> None:
    record = answered("a.png")
    index = index_of(tmp_path, record)

    assert index.look_up(record["id"], "a.png") == "answered"
    assert index.claim(record["id"], "a.png") == "answered"
    assert index.claim(record["id"], "a.png") is None  # named twice, it gets two records
    assert index.claim("00" * 16, "a.png") is None


def test_a_failure_is_told_apart_and_an_answer_after_it_counts(tmp_path: Path) -> None:
    bad, mended = failed("bad.png", "bb" * 32), [failed("mended.png", "cc" * 32), answered("mended.png", "cc" * 32)]
    index = index_of(tmp_path, bad, *mended)

    assert index.look_up(bad["id"], "bad.png") == "failed"
    assert index.claim(bad["id"], "bad.png") == "failed"
    assert index.look_up(mended[0]["id"], "mended.png") == "answered"
    assert index.claim(mended[0]["id"], "mended.png") == "answered"
    assert index.claim(mended[0]["id"], "mended.png") is None  # the failure before it is nobody's record


def test_a_failure_that_came_after_an_answer_is_noticed_until_it_is_answered_again(tmp_path: Path) -> None:
    record, own, missing = answered("a.png"), failed("a.png", ""), failed("a.png", "", run="run-2")

    def is_outdated(*records: Record) -> bool:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        index = index_of(path, *records)
        return index.has_failed_since(record["id"], "a.png", failure_id=missing["id"])

    assert is_outdated(record, missing)
    assert not is_outdated(missing, record)
    assert not is_outdated(record, missing, record)
    assert not is_outdated(record, own)  # of a namesake, which its run has met as well
    assert not is_outdated(record, failed("b.png", "", run="run-2"))
    assert is_outdated(missing)
    assert is_outdated(answered("moved.png"), missing)


def test_a_picture_that_was_renamed_or_moved_is_not_answered_again(tmp_path: Path) -> None:
    record = answered("old/name.png")
    new = tmp_path / "new.png"
    new.touch()

    index = index_of(tmp_path, record)

    assert index.look_up(record["id"], str(new)) == "elsewhere"
    assert index.claim(record["id"], str(new), path=str(new)) == "answered"


def test_a_picture_named_by_another_path_is_the_same(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.touch()
    roundabout = f"{tmp_path}/../{tmp_path.name}/a.png"
    record = answered(str(picture))

    assert index_of(tmp_path, record).claim(record["id"], roundabout, path=roundabout) == "answered"


def test_a_copy_beside_the_answered_picture_gets_its_own_answer(tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    first.touch()
    second.touch()
    # b.png was answered before the run was killed; a.png, of equal bytes, comes first now.
    record = answered(str(second))
    index = index_of(tmp_path, record)

    assert index.claim(record["id"], str(first), path=str(first)) is None
    assert index.claim(record["id"], str(second), path=str(second)) == "answered"


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_link_beside_the_answered_picture_gets_its_own_answer(
    link: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    second.touch()
    link(second, first)
    record = answered(str(second))
    index = index_of(tmp_path, record)

    assert index.claim(record["id"], str(first), path=str(first)) is None
    assert index.claim(record["id"], str(second), path=str(second)) == "answered"


def test_a_copy_beside_a_picture_of_an_odd_name_gets_its_own_answer(tmp_path: Path) -> None:
    odd, copy = os.fsdecode(bytes(tmp_path) + b"/a\xff.png"), tmp_path / "b.png"
    Path(odd).touch()
    copy.touch()
    record = answered(odd)
    index = index_of(tmp_path, record)

    assert index.claim(record["id"], str(copy), path=str(copy)) is None
    assert index.claim(record["id"], odd, path=odd) == "answered"


def test_a_record_under_an_escaped_name_is_of_the_picture_that_had_it(tmp_path: Path) -> None:
    odd, copy = str(tmp_path / "9.41\u202fAM.png"), tmp_path / "b.png"
    Path(odd).touch()
    copy.touch()
    record = escaped(answered(odd))
    index = index_of(tmp_path, record)

    assert index.claim(record["id"], str(copy), path=str(copy)) is None
    assert index.claim(record["id"], odd, path=odd) is None
    assert index.claim_escaped(record["id"], record["picture"]) == "answered"
    assert index.claim_escaped(record["id"], record["picture"]) is None


def test_a_name_that_looks_escaped_and_is_not_stands_for_itself(tmp_path: Path) -> None:
    literal = answered(str(tmp_path / r"inv\xff.png"))
    index = index_of(tmp_path, literal)

    assert index.claim_escaped(literal["id"], literal["picture"]) is None
    assert index.claim(literal["id"], literal["picture"]) == "answered"


def test_names_that_differ_in_undecoded_bytes_alone_are_two(tmp_path: Path) -> None:
    one, other = "a\udcff.png", "a\udcfe.png"
    record = answered(one)

    assert index_of(tmp_path, record).look_up(record["id"], one) == "answered"
    assert index_of(tmp_path, record).look_up(record["id"], other) == "elsewhere"


def test_equal_pictures_of_one_archive_are_copies_too(tmp_path: Path) -> None:
    archive = tmp_path / "shard.tar"
    archive.touch()
    record = answered(f"{archive}/b.png")
    index = index_of(tmp_path, record)

    assert index.claim(record["id"], f"{archive}/a.png") is None
    assert index.claim(record["id"], f"{archive}/b.png") == "answered"


def test_remote_pictures_are_taken_to_be_there_still(tmp_path: Path) -> None:
    record = answered("s3://bucket/a.png")
    index = index_of(tmp_path, record)

    assert index.claim(record["id"], "s3://bucket/b.png") is None
    assert index.claim(record["id"], "s3://bucket/a.png") == "answered"


def test_ids_of_another_form_are_found_too(tmp_path: Path) -> None:
    record: Record = {**answered("a.png"), "id": "not hexadecimal"}
    index = index_of(tmp_path, record)

    assert index.claim("not hexadecimal either", "a.png") is None
    assert index.claim("not hexadecimal", "a.png") == "answered"


def test_it_agrees_with_a_multiset_over_many_records(tmp_path: Path) -> None:
    draw = random.Random(1)
    base = answered("a.png")

    def key() -> tuple[str, str]:  # remote names: no record stands for a picture of another name
        return f"{draw.randrange(40):032x}", f"s3://bucket/{draw.randrange(4)}.png"

    keys = [key() for _ in range(300)]
    index = index_of(tmp_path, *[{**base, "id": record_id, "picture": picture} for record_id, picture in keys])
    left = Counter(keys)

    for record_id, picture in [key() for _ in range(600)]:
        expected = "answered" if left[record_id, picture] else None
        left[record_id, picture] -= bool(expected)
        assert index.claim(record_id, picture) == expected


def test_it_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    record = answered("a.png")
    index = pickle.loads(pickle.dumps(index_of(tmp_path, record)))

    assert (len(index), index.claim(record["id"], "a.png")) == (1, "answered")


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.touch()
    index = RecordIndex([path])

    assert (len(index), index.claim("00" * 16, "a.png"), index.look_up("00" * 16, "a.png")) == (0, None, None)


@pytest.mark.parametrize("suffix", ["", "x"])
def test_equal_keys_in_the_first_half_alone_do_not_match(suffix: str, tmp_path: Path) -> None:
    record: Record = {**answered("a.png"), "id": "ab" * 8 + "00" * 8}
    index = index_of(tmp_path, record)

    assert index.look_up("ab" * 8 + "11" * 8, f"a.png{suffix}") is None


def test_a_replaced_record_keeps_its_place(tmp_path: Path) -> None:
    one, two = answered("a.png", "11" * 32), answered("b.png", "22" * 32)
    index = index_of(tmp_path, *[replace_text(record) for record in (one, two)])

    assert index._record_of(int(index._offsets.argmax()))["picture"] == "b.png"


def replace_text(record: Record) -> Record:
    return {**record, "text": "a longer text " * 50}


def test_a_label_keeps_its_meaning_whatever_its_characters(tmp_path: Path) -> None:
    odd = replace(FakeAnswer(), picture="lone \udc80 surrogate.png")
    record = recorded(odd)

    assert index_of(tmp_path, record).claim(record["id"], "lone \udc80 surrogate.png") == "answered"
