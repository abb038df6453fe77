"""Records: which parts of an answer they keep."""

import json
import os
from typing import Any

import pytest

from llama_adapter.app.jobs.records.record import Record, json_line, parse_record
from llama_adapter.runtime.record_lines import FIELDS
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS
from llama_adapter.vision.formats import PICTURE_NOTES
from tests.app.recorded import failed, recorded


def test_a_record_has_every_key_in_its_order() -> None:
    record = recorded()
    assert list(record) == ["id", "picture", "prompt", "text", "finish", "choice", "tokens", "error", "ms", "run"]
    assert record["tokens"] == 3
    assert record["ms"] == {"clip": 1.235, "total": 9.0}
    assert (record["choice"], record["error"], record["run"]) == (None, None, "run-1")


@pytest.mark.parametrize("unfamiliar", [True, False])
def test_what_is_known_of_an_unfamiliar_picture_is_kept_and_records_without_it_are_records(unfamiliar: bool) -> None:
    record = recorded(unfamiliar=unfamiliar)
    assert record["unfamiliar"] is unfamiliar
    assert record["id"] == recorded()["id"], "it is no reason to answer again"
    assert "unfamiliar" not in recorded()
    for each in (record, recorded()):
        assert parse_record(json_line(each).encode()) == each


def test_choices_and_errors_are_kept_as_plain_values() -> None:
    chosen = recorded(finish="choice", text="Yes", choice={"Yes": 0.912345678, "No": 0.087654322})
    assert chosen["choice"] == {"Yes": 0.912346, "No": 0.0876543}
    assert failed("missing", "Wanted it.")["error"] == {"code": "missing", "message": "Wanted it."}


def test_a_line_is_one_line_of_readable_json_whatever_the_text() -> None:
    for text in ("été 图", "line\nbreak\r\u2028\x85", 'quote " \\', "lone \ud83d surrogate", "nul \0", ""):
        line = json_line(recorded(text=text))
        assert "\n" not in line
        line.encode()
        assert json.loads(line)["text"] == text
    assert "été" in json_line(recorded())


def test_numbers_that_json_lacks_become_null() -> None:
    record = recorded(ms={"total": float("inf")}, choice={"Yes": float("nan")})
    values = json.loads(json_line(record))
    assert (values["ms"], values["choice"]) == ({"total": None}, {"Yes": None})


@pytest.mark.parametrize(
    "values",
    [
        *({name: 5} for name in ("id", "picture", "prompt", "text", "finish", "run")),
        *({name: None} for name in ("id", "picture", "prompt", "text", "finish", "run", "tokens", "ms")),
        *({name: ...} for name in ("run", "text", "error", "choice", "tokens", "ms")),
        *({"error": wrong} for wrong in ("no", [], {}, {"code": 1, "message": ""}, {"code": "missing"})),
        *({"choice": wrong} for wrong in ([], {}, {"a": 1.0}, {"a": "1", "b": 0}, {"a": True, "b": 0})),
        *({"ms": wrong} for wrong in ([], {"total": "1"}, {"total": float("inf")}, {"total": 10**400})),
        *({"tokens": wrong} for wrong in ("3", 1.5, True, -1, 2**63, float("inf"), float("nan"))),
        *({"unfamiliar": wrong} for wrong in ("no", 0.5, 2.0, float("nan"))),
    ],
)
def test_a_value_of_another_kind_makes_a_line_no_record(values: dict[str, Any]) -> None:
    line = {name: value for name, value in {**recorded(), **values}.items() if value is not ...}
    assert parse_record(json.dumps(line).encode()) is None
    assert parse_record(json.dumps(recorded()).encode()) == recorded()


@pytest.mark.parametrize(
    ("name", "number", "value"),
    [
        *((name, number, bool(number)) for name in ("unfamiliar", *PICTURE_NOTES) for number in (0.0, 1.0)),
        *(("transparent", number, number) for number in (2.0, 0.5)),
        *((name, 3.0, 3) for name in ("tokens", "number", "row")),
        ("row", 0.5, 0.5),
        ("another", 1.0, 1.0),
    ],
)
def test_integers_and_truth_values_that_pandas_wrote_are_what_they_were(name: str, number: float, value: Any) -> None:
    found = parse_record(json.dumps(recorded() | {name: number}).encode())[name]
    assert (found, type(found)) == (value, type(value))


def test_the_fields_of_answers_are_those_of_records() -> None:
    assert FIELDS.keys() == Record.__required_keys__


@pytest.mark.parametrize(
    "name",
    ["9.41\u202fAM.png", "a\n\x1b[31m\x9b.png", "\u202egnp.png", os.fsdecode(b"inv\xff.png"), r"inv\xff.png"],
)
def test_a_name_reads_back_as_it_was_with_what_is_no_escape_and_no_terminal_acts_on_its_line(name: str) -> None:
    line = json_line(recorded(picture=name))

    record = parse_record(line.encode())
    assert record["picture"] == name
    assert not UNSAFE_ON_TERMINALS.search(line)
