"""Kinds x readers: the same pictures, questions and answers in every form are the same to jobs and to labelled data."""

import json
import shutil
import unicodedata
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.pictures.inputs import InputSpec, check_inputs, read_inputs
from tests.app.pictures.inputs.files import tar_bytes
from tests.outside.test_tables import answered, examples

PICTURES = sorted((Path(__file__).parent / "json-sets").glob("*.png"))
QUESTION = "What color is the circle, in one word?"
COLORS = ("red", "blue", "grün")
ROWS = [(path.name, QUESTION, COLORS[number % 3]) for number, path in enumerate(PICTURES)]
CAPTIONS = [(name, None, color) for name, _, color in ROWS]

Rows = list[tuple[str, str | None, str]]
Writer = Callable[[Path], Path]


def cells(delimiter: str, *, encoding: str = "utf-8", end: str = "\n", head: str = "", name: str = "t.csv") -> Writer:
    def write(folder: Path) -> Path:
        quoted = f'"{QUESTION}"'
        lines = [f"Image{delimiter} question{delimiter}ANSWER{delimiter}{delimiter}"]
        lines += [delimiter.join((picture, quoted, f" {color} ", "", "")) for picture, _, color in ROWS]
        path = folder / name
        path.write_bytes((head + "".join(line + end for line in (*lines, "", delimiter))).encode(encoding))
        return path

    return write


def values(
    data: Any, *, name: str, as_lines: bool = False, end: str = "\n", indent: int | None = None, encoding: str = "utf-8"
) -> Writer:
    def write(folder: Path) -> Path:
        path = folder / name
        texts = [json.dumps(one, indent=indent) for one in (data if as_lines else [data])]
        path.write_text(end.join(texts), encoding, newline="")
        return path

    return write


def beside(suffix: str) -> Writer:
    def write(folder: Path) -> Path:
        for name, question, color in ROWS:
            text = f"{color}\n" if suffix == ".txt" else json.dumps({"question": question, "answer": color})
            (folder / name).with_suffix(suffix).write_text(text)
        return folder

    return write


def parquet(folder: Path) -> Path:
    """Classes are numbers, as the `datasets` library writes them, and other columns have values that JSON lacks.

    A feature may be a list or a struct, be no column, or have other values than its type says.
    """
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = dict(zip(("image", "question", "answer"), zip(*ROWS, strict=True), strict=True))
    columns["answer"] = [COLORS.index(color) for color in columns["answer"]]
    columns["question"] = pyarrow.array(columns["question"]).dictionary_encode()
    columns |= {"on": [date(2026, 1, 1)] * len(ROWS), "m": [Decimal("0.5")] * len(ROWS), "md5": [b"\xff"] * len(ROWS)}
    classes = {"names": COLORS, "_type": "ClassLabel"}
    features = {"boxes": [classes], "at": {"x": {"_type": "Value"}}, "label": classes, "answer": classes}
    features |= {"question": classes, "image": {"_type": "Value"}}
    info = {"huggingface": json.dumps({"info": {"features": features}})}
    pyarrow.parquet.write_table(pyarrow.table(columns).replace_schema_metadata(info), folder / "t.parquet")
    return folder / "t.parquet"


def spelt(folder: Path) -> Path:
    """Names as on Windows, in addresses, on macOS and without suffix."""
    (folder / ROWS[0][0]).rename(folder / unicodedata.normalize("NFD", "é 0.png"))
    names = [f".\\{name}" if number % 2 else f"file://{folder}/%2E/{name}" for number, (name, *_) in enumerate(ROWS)]
    names[2] = Path(ROWS[2][0]).stem
    names[0] = ".\\" + unicodedata.normalize("NFC", "é%200")
    lines = [f"{name};{question};{color}" for name, (_, question, color) in zip(names, ROWS, strict=True)]
    (folder / "t.csv").write_text("\n".join(["image;question;answer", *lines]))
    return folder / "t.csv"


def archive(mode: str, *, text: bool, whole_names: bool = False) -> Writer:
    def write(folder: Path) -> Path:
        path, members = folder / ("t.tar" if mode == "w" else "t.tar.gz"), {}
        for name, question, color in ROWS:
            stem, row = name if whole_names else Path(name).stem, {"question": question, "answer": color}
            suffix, told = ("txt", color) if text else ("json", json.dumps(row))
            members |= {name: (folder / name).read_bytes(), f"{stem}.{suffix}": told.encode()}
            (folder / name).unlink()
        path.write_bytes(tar_bytes(members, mode=mode))
        return path

    return write


OBJECTS = [{"image": name, "question": question, "answer": color} for name, question, color in ROWS]
TURNS = [
    {"image": name, "conversations": [{"from": "human", "value": f"<image>\n{asked}"}, {"from": "gpt", "value": color}]}
    for name, asked, color in ROWS
]
IMAGES = [{"id": number, "file_name": name} for number, (name, *_) in enumerate(ROWS)]
WINDOWS = {"images": [{**image, "file_name": f".\\{image['file_name']}"} for image in IMAGES]}
COCO = {"images": IMAGES, "annotations": [{"image_id": number, "caption": row[2]} for number, row in enumerate(ROWS)]}
VIZWIZ = [
    {"image": row[0], "question": row[1], "answers": [{"answer": one} for one in ("no", row[2], row[2])]}
    for row in ROWS
]
LISTED = [
    {"image": name, "question": f"<image>\n{asked}", "answers": json.dumps([color])} for name, asked, color in ROWS
]
KARPATHY = {"images": [{"filename": name, "sentences": [{"raw": color}]} for name, _, color in ROWS]}
VQA = {
    "questions": [{"question_id": n, "image_id": row[0], "question": row[1]} for n, row in enumerate(ROWS)],
    "annotations": [{"question_id": n, "answers": [{"answer": row[2]}]} for n, row in enumerate(ROWS)],
}

# kind: how it is written, and what is right. Jobs do not read texts beside pictures: they are answers.
KINDS: dict[str, tuple[Writer, Rows]] = {
    "CSV": (cells(","), ROWS),
    "semicolons": (cells(";"), ROWS),
    "tabs": (cells("\t", name="t.tsv"), ROWS),
    "bars": (cells("|"), ROWS),
    "sep=": (cells(";", head="SEP=;\n", name="T.CSV"), ROWS),
    "quoted sep=": (cells("|", head='"sep=|"\r\n', end="\r\n"), ROWS),
    "spaces before quotes": (cells(", "), ROWS),
    "empty rows before the names": (cells(";", head=";;;;\n\n"), ROWS),
    "CSV called .txt": (cells(",", name="t.txt"), ROWS),
    "CSV called .json": (cells(",", name="t.json"), ROWS),
    "semicolons called .tsv": (cells(";", name="t.tsv"), ROWS),
    "byte order mark": (cells(";", encoding="utf-8-sig"), ROWS),
    "UTF-16": (cells("\t", encoding="utf-16"), ROWS),
    "CRLF": (cells(",", end="\r\n"), ROWS),
    "CR": (cells(",", end="\r"), ROWS),
    "JSON list": (values(OBJECTS, name="t.json"), ROWS),
    "JSON list called .csv": (values(OBJECTS, name="t.csv"), ROWS),
    "JSON list in UTF-16": (values(OBJECTS, name="t.json", encoding="utf-16"), ROWS),
    "JSON lines": (values(OBJECTS, name="t.jsonl", as_lines=True), ROWS),
    "JSON lines with CR": (values(OBJECTS, name="t.jsonl", as_lines=True, end="\r"), ROWS),
    "JSON over lines called .jsonl": (values(COCO, name="t.jsonl", indent=1), CAPTIONS),
    "JSON lines called .json": (values(OBJECTS, name="t.json", as_lines=True), ROWS),
    "JSON objects over lines": (values(OBJECTS, name="t.jsonl", as_lines=True, indent=1), ROWS),
    "JSON by number": (values({str(number): one for number, one in enumerate(OBJECTS)}, name="t.json"), ROWS),
    "JSON list in an object": (values({"version": {"of": 1}, "data": OBJECTS}, name="t.json"), ROWS),
    "LLaVA": (values(TURNS, name="t.json"), ROWS),
    "LLaVA's only row": (values(TURNS[0], name="t.json"), ROWS[:1]),
    "VizWiz": (values(VIZWIZ, name="t.json"), ROWS),
    "lists in cells, a mark in questions": (values(LISTED, name="t.json"), ROWS),
    "VQA": (values(VQA, name="t.json"), ROWS),
    "COCO": (values(COCO, name="t.json"), CAPTIONS),
    "COCO of Windows": (values(COCO | WINDOWS, name="t.json"), CAPTIONS),
    "Karpathy": (values(KARPATHY, name="t.json"), CAPTIONS),
    "names": (values({name: color for name, _, color in ROWS}, name="t.json"), CAPTIONS),
    "kohya": (values({Path(name).stem: {"caption": color} for name, _, color in ROWS}, name="metadata.json"), CAPTIONS),
    "Parquet": (parquet, ROWS),
    "names of other systems": (spelt, [(unicodedata.normalize("NFD", "é 0.png"), *ROWS[0][1:]), *ROWS[1:]]),
    "metadata.csv": (lambda folder: cells(";", name="metadata.csv")(folder).parent, ROWS),
    "JSON beside pictures": (beside(".json"), ROWS),
    "texts beside pictures": (beside(".txt"), CAPTIONS),
    "tar with JSON": (archive("w", text=False), ROWS),
    "tar.gz with JSON": (archive("w:gz", text=False), ROWS),
    "tar with texts": (archive("w", text=True), CAPTIONS),
    "tar with texts of whole names": (archive("w", text=True, whole_names=True), CAPTIONS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_same_to_labelled_data_and_to_jobs(kind: str, tmp_path: Path) -> None:
    for picture in PICTURES:
        shutil.copy(picture, tmp_path)
    write, right = KINDS[kind]
    path = write(tmp_path)
    assert sorted(answered(path), key=str) == sorted(right, key=str)  # of `eval` and `train`

    is_table = path.is_file() and ".tar" not in path.name
    spec = InputSpec(manifests=(str(path),)) if is_table else InputSpec(paths=(str(path),))
    check_inputs(spec)
    items = list(read_inputs(spec))  # of `caption`, `ask`, `generate` and `encode`
    assert sorted(Path(item.label).name for item in items if item.error is None) == sorted(row[0] for row in right)
    asked = [question.instruction for item in items for question in item.questions]
    if is_table:
        assert asked == [row[1] for row in right if row[1] is not None]
    else:  # a folder is its pictures, and what an archive tells about one is a variable: --question "{question}"
        assert asked == []
        told = {item.columns.get("question") for item in items}
        assert told == ({QUESTION} if kind.endswith("with JSON") else {None})


def test_a_set_is_known_by_any_of_its_entries(tmp_path: Path) -> None:
    """The first picture of a file may have no captions."""
    found = examples(tmp_path, {"images": [{"filename": "a.png"}, *KARPATHY["images"]]})

    assert len(found.examples) == len(ROWS)
    assert found.left_out.note().startswith("rows without an answer: 1")
