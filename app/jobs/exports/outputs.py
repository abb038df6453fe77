"""Writes records, the decisions on them, and texts made by templates, to exported files."""

import json
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from llama_adapter.app.captioning.decisions.decider import Decider, Decision
from llama_adapter.app.jobs.exports.formats import CSV_COLUMNS, Cell, csv_cells, csv_lines
from llama_adapter.app.jobs.exports.sidecars import Refusals
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.app.jobs.records.record import Record, json_line, read_records
from llama_adapter.app.pictures.names import name_as_text, place_of
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_name

METADATA_NAME: Final = "metadata.jsonl"
KOHYA_NAME: Final = "metadata.json"
_DECISION_COLUMNS: Final = ("decision", "probability")
_PART: Final = re.compile(r"part-\d{5,}\.[a-z]+")
_NUM_FRONT: Final = 2  # columns before the decision: picture and text
_FIELDS: Final = ("text", "stem", "parent")  # of templates


class Row(NamedTuple):
    """A record that is exported, and the decision on it, if it has choices."""

    record: Record
    decision: Decision | None

    @property
    def picture(self) -> str:
        """The name of the picture."""
        return self.record["picture"]

    @property
    def text(self) -> str:
        """The text of the picture: the decision if there is one, else the answer."""
        return self.record["text"] if self.decision is None else self.decision.text

    @property
    def decided(self) -> dict[str, str | float | None]:
        """The decision and its probability, by the names of their columns; None without choices."""
        made = (None, None) if self.decision is None else (self.decision.text, self.decision.probability)
        return dict(zip(_DECISION_COLUMNS, made, strict=True))


@dataclass(frozen=True, slots=True)
class Template:
    """For example `shapeart, {text}`. `{stem}` is the picture's name without suffix, `{parent}` that of its folder."""

    text: str = "{text}"

    def __post_init__(self) -> None:
        """Raise ValueError for another field, or braces that are not closed or doubled."""
        try:
            parts = list(string.Formatter().parse(self.text))
        except ValueError:
            raise ValueError(f"template {self.text!r} has a brace alone: double a brace that is text") from None
        if any(name is not None and (name not in _FIELDS or spec or conversion) for _, name, spec, conversion in parts):
            names = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise ValueError(f"wanted the fields {names} in a template, got {self.text!r}")

    def fill(self, row: Row) -> str:
        """The text for the picture of a row."""
        if self.text == "{text}":
            return row.text
        folder, name = os.path.split(place_of(row.picture))
        parent, stem = os.path.basename(folder), os.path.splitext(name)[0]
        return self.text.format(text=row.text, stem=name_as_text(stem), parent=name_as_text(parent))


def with_decisions(records: Iterable[Record], decider: Decider) -> Iterator[Row]:
    """Each record with its decision, if it has choices. Raises ValueError for choices that were not calibrated."""
    return (Row(one, None if one["choice"] is None else decider.decide(one["choice"])) for one in records)


def jsonl_lines(rows: Iterable[Row], *, decider: Decider) -> Iterator[bytes]:
    """The records as JSON lines. If a rule or calibration is given, `decision` and `probability` are added."""
    for row in rows:
        further = {} if row.decision is None or decider.is_plain else row.decided
        yield json_line({**row.record, **further}).encode() + b"\n"


def write_targets(path: str, asked: Iterable[tuple[str, RecordKey, str]], *, records: Iterable[Path]) -> None:
    """Write `{"src", "tgt", "output"}` for each question that has a record, as PaddleNLP's predictor writes answers.

    `asked` are the digest, key and target of each question. An existing file is replaced.
    """
    texts: dict[tuple[str, str], str] = {}
    for file in records:
        for record in read_records(file):
            texts[record["id"], record["picture"]] = texts[record["id"], ""] = record["text"]
    with atomic_write(path) as out:
        for digest, key, target in asked:
            text = texts.get((key.id(digest), key.picture), texts.get((key.id(digest), "")))
            if text is not None:
                line = {"src": key.prompt, "tgt": target, "output": text}
                out.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")


def table_lines(rows: Iterable[Row], *, choices: Sequence[str], decider: Decider) -> Iterator[bytes]:
    """A CSV table, see `formats.to_csv`, with the decision, its probability and a column for each of `choices`."""
    kind = "probability of" if decider.calibration is None else "calibrated probability of"
    front, rest = CSV_COLUMNS[:_NUM_FRONT], CSV_COLUMNS[_NUM_FRONT:]
    head = [*front, *_DECISION_COLUMNS, *rest, *(f"{kind} {name}" for name in choices)]

    def table() -> Iterator[Sequence[Cell]]:
        yield head
        for row in rows:
            cells = csv_cells(row.record)
            shares = {} if row.decision is None else row.decision.choice
            decided = row.decided.values()
            yield [*cells[:_NUM_FRONT], *decided, *cells[_NUM_FRONT:], *(shares.get(name) for name in choices)]

    return csv_lines(table())


def metadata_lines(
    rows: Iterable[Row], *, folder: str, has_choices: bool, template: Template, refusals: Refusals
) -> Iterator[bytes]:
    """Hugging Face's metadata.jsonl for the pictures in `folder`: file_name, text, and the record's other facts.

    Every line has the same fields. Missing pictures, members of archives and names that are not UTF-8 are left out as
    refused, because the whole folder could not be loaded with them. Raises UsageError for a picture outside the folder.
    """
    for row in rows:
        name = name_in_folder(row.picture, folder=folder)
        if not _is_usable(row.picture, os.path.join(folder, name), refusals=refusals):
            continue
        line = {"file_name": name, "text": template.fill(row), **(row.decided if has_choices else {})}
        facts = {name: row.record.get(name) for name in ("prompt", "finish", "unfamiliar", "tokens", "id", "run")}
        yield json_line({**line, **facts}).encode() + b"\n"


def kohya_lines(rows: Iterable[Row], *, template: Template, refusals: Refusals) -> Iterator[bytes]:
    """A JSON object with a caption for each picture, for `--in_json` of kohya's trainers (sd-scripts).

    Its keys are absolute paths, as those of merge_captions_to_metadata.py with `--full_path`. Missing pictures, members
    of archives and names that are not UTF-8 are left out as refused.
    """
    start = b"{\n"
    for row in rows:
        if _is_usable(row.picture, row.picture, refusals=refusals):
            line = json_line({os.path.abspath(row.picture): {"caption": template.fill(row)}})
            yield start + line[1:-1].encode()
            start = b",\n"
    yield b"{}\n" if start == b"{\n" else b"\n}\n"


def _is_usable(picture: str, path: str, *, refusals: Refusals) -> bool:
    """Whether a picture exists and has a name that JSON can hold; refused otherwise."""
    if not os.path.isfile(path):
        advice = "export in the folder where the job ran; remove the record of a deleted picture"
        refusals.add(picture, f"there is no such file; {advice}")
    elif name_as_text(path) != path:
        refusals.add(picture, "its name is not UTF-8, which JSON has to be; rename the picture")
    else:
        return True
    return False


def name_in_folder(picture: str, *, folder: str) -> str:
    """The path of a picture relative to a folder, with slashes. Raises UsageError for a picture outside the folder."""
    for resolve in (os.path.abspath, os.path.realpath):
        try:
            name = os.path.relpath(resolve(picture), resolve(folder))
        except ValueError:  # the name has a null character
            continue
        if name != os.pardir and not name.startswith(os.pardir + os.sep):
            return name.replace(os.sep, "/")
    raise UsageError(
        f"`{shown_name(picture)}` is not in `{shown_name(folder)}`, where its {METADATA_NAME} would be",
        hint="name the folder of all pictures, or one above it, as --out",
    )


def check_parts(folder: Path, *, force: bool) -> None:
    """Raise UsageError if `folder` is a file, or holds parts of an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"Wanted a folder for parts, and `{folder}` is a file", hint="name a folder as --out")
    if not force and _old_parts(folder):
        raise UsageError(f"`{folder}` holds parts of an earlier export", hint="--force replaces them")


def write_parts(
    rows: Iterable[Row],
    folder: Path,
    *,
    suffix: str,
    rows_in_a_part: int,
    write: Callable[[Iterator[Row], BinaryIO], object],
) -> None:
    """Write part-00000.suffix and so on, each whole or not at all, and remove others of an earlier export."""
    folder.mkdir(parents=True, exist_ok=True)
    old, written, rest = _old_parts(folder), set(), iter(rows)
    for number, first in enumerate(rest):
        part = folder / f"part-{number:05d}.{suffix}"
        with atomic_write(part) as file:
            write(chain([first], islice(rest, rows_in_a_part - 1)), file)
        written.add(part)
    for part in old - written:
        part.unlink(missing_ok=True)


def _old_parts(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if _PART.fullmatch(path.name)} if folder.is_dir() else set()


ROWS_IN_A_GROUP: Final = 10_000


def write_parquet(rows: Iterable[Row], file: BinaryIO, *, runs: list[dict[str, Any]]) -> None:
    """Write the columns of `parquet_schema` in row groups, in bounded memory. The metadata contains `runs`.

    `runs` are the runs in the manifests. The schema does not depend on the records, so that the files of all shards of
    a job can be combined.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = parquet_schema().with_metadata({b"llama-adapter-runs": json.dumps(runs).encode()})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        rest = iter(rows)
        while group := list(islice(rest, ROWS_IN_A_GROUP)):
            writer.write_table(pa.Table.from_pylist([_cells(row, names=schema.names) for row in group], schema=schema))


def parquet_schema() -> Any:
    """A pyarrow schema: the fields of a record, its error in two columns, and the decision."""
    import pyarrow as pa

    numbers = pa.map_(pa.string(), pa.float64())
    return pa.schema(
        [
            *(pa.field(name, pa.string(), nullable=False) for name in ("id", "picture", "prompt", "text", "finish")),
            pa.field("choice", numbers),  # probabilities before calibration
            pa.field("decision", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("tokens", pa.int64(), nullable=False),
            pa.field("unfamiliar", pa.bool_()),  # null if the model cannot tell
            pa.field("error_code", pa.string()),
            pa.field("error_message", pa.string()),
            pa.field("ms", numbers, nullable=False),
            pa.field("run", pa.string(), nullable=False),
        ]
    )


def _cells(row: Row, *, names: Iterable[str]) -> dict[str, Any]:
    """The values of a row for the columns `names`."""
    error: Mapping[str, object] = row.record["error"] or {}
    of_error = {f"error_{name}": error.get(name) for name in ("code", "message")}
    values = {**row.record, **row.decided, **of_error}
    return {name: _cell(values.get(name)) for name in names}


def _cell(value: Any) -> Any:
    """A value as Arrow takes it: maps as pairs, and lone surrogates, which a record may contain, as escapes."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return [(_cell(name), one) for name, one in value.items()]
    return value
