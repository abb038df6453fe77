"""Which records count: all except superseded failures, and records that were written twice."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.jobs.exports.survey import Selection, Survey, record_files, survey
from llama_adapter.app.jobs.records.record import Record, json_line
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.record_lines import RecordFileError
from tests.app.recorded import failed as failure
from tests.app.recorded import recorded

ALL = Selection()


def record(picture: str = "a.png", *, id: str = "1", prompt: str = "p", failed: bool = False, **changes: Any) -> Record:
    made = failure if failed else recorded
    return made(picture=picture, id=id, prompt=prompt, **changes)


def write(path: Path, records: Sequence[Record], end: str = "") -> str:
    path.write_text("".join(json_line(one) + "\n" for one in records) + end)
    return str(path)


def surveyed(folder: Path, records: Sequence[Record], selection: Selection = ALL) -> Survey:
    return survey([write(folder / "a.jsonl", records)], selection)


@pytest.mark.parametrize(
    ("records", "kept"),
    [
        # A failure is superseded by a record of a later run about the same picture and prompt.
        (
            [
                record(id="name", failed=True, run="earlier"),
                record("b.png", failed=True),
                record(id="2"),
                record(id="9", prompt="q", failed=True),
            ],
            [1, 2, 3],
        ),
        # It is not superseded by its own run, which asked something else or read a picture with the same name.
        ([record(id="cut off", failed=True), record(id="2"), record(id="too many choices", failed=True)], [0, 1, 2]),
        ([record(failed=True), record(failed=True, run="later")], [1]),
        ([record(id="1"), record(id="name", failed=True)], [0, 1]),  # the picture disappeared after its answer
        ([record(text="first"), record(text="last"), record(failed=True)], [1]),
        ([record("a.png"), record("b.png")], [0, 1]),  # copies
    ],
    ids=["superseded", "own run", "failed again", "missing later", "written twice", "copies"],
)
def test_which_records_count(tmp_path: Path, records: list[Record], kept: list[int]) -> None:
    found = surveyed(tmp_path, records)

    assert list(found.records()) == [records[index] for index in kept]
    num_failed = sum(records[index]["error"] is not None for index in kept)
    assert (found.num_taken, found.num_failed) == (len(kept), num_failed)
    assert found.num_superseded == len(records) - len(kept)


def test_answers_of_two_models_both_count(tmp_path: Path) -> None:
    found = surveyed(tmp_path, [record(id="1", text="one"), record("b.png"), record(id="2", text="two")])

    assert (found.num_taken, found.num_repeated, found.has_several_prompts) == (3, 1, False)
    assert [one["text"] for one in found.last_of_pictures() if one["picture"] == "a.png"] == ["two"]


def test_a_picture_with_two_prompts_is_noticed_unless_one_is_chosen(tmp_path: Path) -> None:
    records = [record(id="1", prompt="p", run="one"), record(id="2", prompt="q", run="two")]

    assert surveyed(tmp_path, records).has_several_prompts
    chosen = surveyed(tmp_path, records, Selection(prompt="q"))
    assert not chosen.has_several_prompts
    assert [one["prompt"] for one in chosen.records()] == ["q"]
    assert (list(chosen.prompts), list(chosen.runs)) == (["p", "q"], ["two"])


def test_failures_and_unfamiliar_pictures_are_counted_and_left_out_if_so_chosen(tmp_path: Path) -> None:
    failed, strange = record("b.png", failed=True, run="two"), record("c.png", unfamiliar=True, run="three")
    chosen = Selection(only_answers=True, skip_unfamiliar=True)
    found = surveyed(tmp_path, [record(run="one"), failed, strange], chosen)

    assert [one["picture"] for one in found.records()] == ["a.png"]
    assert (found.num_taken, found.num_failed, found.num_unfamiliar, list(found.runs)) == (1, 1, 1, ["one"])


def test_a_name_with_a_backslash_is_not_that_of_the_picture_with_the_character(tmp_path: Path) -> None:
    literal, real = (str(tmp_path / name) for name in (r"9.41\u202fAM.png", "9.41\u202fAM.png"))
    Path(real).touch()

    assert surveyed(tmp_path, [record(literal), record(real)]).num_pictures == 2


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    write(parts / "part-10.jsonl", [record(id="2")])
    write(parts / "part-9.jsonl", [record(id="name", failed=True, run="earlier")])
    (parts / "part-9.jsonl.manifest.json").write_text("{}")

    files = record_files([str(parts)])
    assert [Path(file).name for file in files] == ["part-9.jsonl", "part-10.jsonl"]
    assert [one["id"] for one in survey(files, ALL).records()] == ["2"]
    assert record_files([files[0], str(parts)]) == files


def test_a_file_that_is_overwritten_between_the_readings_is_an_error(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [record(name), record("more")]) for name in ("a.jsonl", "b.jsonl")]
    found = survey(paths, ALL)
    write(tmp_path / "a.jsonl", [record("new")])

    with pytest.raises(RecordFileError, match=r"a\.jsonl` had 2 records at first and 1 later"):
        list(found.records())


def test_a_pipe_is_refused_since_it_cannot_be_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")

    with pytest.raises(UsageError, match="read twice"):
        record_files([str(tmp_path / "pipe.jsonl")])


def test_what_is_appended_after_the_first_reading_does_not_count(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [record(name)]) for name in ("a.jsonl", "b.jsonl")]
    found = survey(paths, ALL)
    with open(paths[0], "a") as file:
        file.write(json_line(record("later")) + "\n")

    assert [one["picture"] for one in found.records()] == ["a.jsonl", "b.jsonl"]


@given(
    st.lists(
        st.builds(
            record,
            picture=st.sampled_from(["a", "b"]),
            id=st.sampled_from(["1", "2", "3"]),
            prompt=st.sampled_from(["p", "q"]),
            failed=st.booleans(),
            run=st.sampled_from(["r", "s"]),
        ),
        max_size=12,
    )
)
def test_every_picture_and_prompt_keeps_an_answer_if_it_ever_had_one(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record]
) -> None:
    kept = list(surveyed(tmp_path_factory.getbasetemp(), records).records())

    def asked(some: Sequence[Record], *, failed: bool) -> set[tuple[str, ...]]:
        return {(one["picture"], one["id"]) for one in some if (one["error"] is not None) == failed}

    assert asked(kept, failed=False) == asked(records, failed=False)
    assert len({(one["id"], one["picture"]) for one in kept}) == len(kept)
    failures = [one for one in kept if one["error"] is not None]
    for one in failures:
        alike = [other for other in records if (other["picture"], other["prompt"]) == (one["picture"], one["prompt"])]
        assert alike[-1]["run"] == one["run"]
