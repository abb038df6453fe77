"""Lists, manifests, sheets of questions and tar archives: each line or member becomes an item, whatever it contains."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from functools import partial

from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.pictures.inputs.archives import archive_inputs
from llama_adapter.app.pictures.inputs.folders import file_input
from llama_adapter.app.pictures.inputs.items import InputsError, PictureInput
from llama_adapter.app.pictures.inputs.manifests import check_manifest, manifest_inputs
from llama_adapter.app.pictures.inputs.prompts import read_question_sheet
from llama_adapter.app.pictures.inputs.reading import list_inputs
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_name
from llama_adapter.vision.errors import PictureError
from tests.app.pictures.inputs.files import tar_bytes
from tests.fuzz.mutators import either, mutated_bytes, mutated_json, mutated_lines, mutated_tar, words
from tests.fuzz.target import Target, new_folder, refused, written

_MOST_ITEMS = 10_000  # per input; more than the bytes of an input can name
_ANNOTATIONS = "v2_mscoco_val2014_annotations.json"  # read together with the questions
_SETS = (
    "coco_pope_random.json",
    "v2_OpenEnded_mscoco_val2014_questions.json",
    "captions_val2014.json",
    "problems.json",
)
_CODES = ("manifest", "list", "archive", "unsupported", "too_large")


def _checked(items: Iterator[PictureInput], *, num_bytes: int) -> str:
    found = list(itertools.islice(items, _MOST_ITEMS))
    assert len(found) <= num_bytes + 1, "more pictures than bytes"
    for item in found:
        assert not UNSAFE_ON_TERMINALS.search(shown_name(item.label))
        assert item.source is not None
        if item.error is not None:
            assert item.error.code in _CODES
            refused(PictureError("unsupported", item.error.message), is_shown=False)
        for question in item.questions:
            assert question.choices is None or len(question.choices) >= 2
        for value in item.columns.values():
            value.encode()
    codes = sorted({item.error.code for item in found if item.error is not None})
    return f"ok {min(len(found), 9)} {codes} {sorted({len(item.questions) for item in found})[:4]}"


def table(data: bytes, *, suffix: str) -> str:
    """A table as a manifest, as a sheet of questions, and as labelled data.

    The manifest is read like by a job: first as a whole, then item by item.
    """
    path = str(written(f"table.{suffix}", data))
    outcomes = []
    try:
        check_manifest(path)
        outcomes.append(_checked(manifest_inputs(path), num_bytes=len(data)))
    except InputsError as error:
        outcomes.append(refused(error))
    try:
        questions = read_question_sheet(path)
        assert len(set(questions)) == len(questions) >= 1
        outcomes.append(f"ok {min(len(questions), 9)}")
    except InputsError as error:
        outcomes.append(refused(error, is_shown=False))
    outcomes.append(_labelled(path))
    return "; ".join(outcomes)


def known_sets(data: bytes) -> str:
    """A JSON file under the names of known sets, as labelled data."""
    written(f"sets/{_ANNOTATIONS}", data)
    return "; ".join(_labelled(str(written(f"sets/{name}", data))) for name in _SETS)


def _labelled(path: str) -> str:
    has_all = path.endswith(".json")  # digests and looks take long, and are the same for all tables
    try:
        found = read_examples(path, digests=has_all, looks=has_all)
    except InputsError as error:
        return refused(error, is_shown=False)
    for example in found.examples:
        assert example.answers
        assert (example.task == "choice") == (example.choices is not None)
    assert not any(UNSAFE_ON_TERMINALS.search(str(problem)) for problem in found.problems)
    return f"ok {min(len(found.examples), 9)} {min(len(found.problems), 9)}"


def sheet(data: bytes) -> str:
    """A sheet of questions as plain text."""
    try:
        questions = read_question_sheet(str(written("sheet.txt", data)))
    except InputsError as error:
        return refused(error)
    assert all(question.instruction and question.instruction.strip() for question in questions)
    return f"ok {min(len(questions), 9)}"


def names(data: bytes) -> str:
    """A list of names, with line feeds or null characters.

    Names are not expanded, and the current folder is empty, so that this machine's files are not read.
    """
    path = str(written("list.txt", data))
    try:
        with contextlib.chdir(new_folder("empty")):
            return _checked(list_inputs(path, expand=lambda name: iter((file_input(name),))), num_bytes=len(data))
    except InputsError as error:
        return refused(error)


def tar(data: bytes) -> str:
    """The members of a tar archive, plain or compressed, and their columns.

    Members that are slices of an uncompressed archive are also read.
    """
    path = str(written("archive.tar", data))
    items = list(itertools.islice(archive_inputs(path, max_bytes=2**20), _MOST_ITEMS))
    for item in items[:200]:
        if isinstance(item.source, FileSlice):
            try:
                assert len(item.source.read(max_bytes=2**20)) == item.source.num_bytes
            except PictureError as error:
                refused(error)
        elif isinstance(item.source, bytes):
            assert len(item.source) <= 2**20
    return _checked(iter(items), num_bytes=2**20)


_ROWS = (
    {"picture": "a.png", "prompt": "What?", "input": "x", "choices": "yes, no", "note": "1"},
    {"picture": "b/é.png", "prompt": "", "input": "", "choices": "", "note": ""},
    {"picture": "http://x/c.png", "prompt": "Who, when?", "input": "", "choices": '["a", "b"]', "note": '"q"\n2'},
)


def _as_cells(delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(_ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(_ROWS)
    return text.getvalue().encode()


def _as_jsonl() -> bytes:
    more = {"file_name": "d.png", "question": "Q", "choices": ["a", "b"], "n": 1, "deep": {"a": []}}
    return b"".join(json.dumps(row).encode() + b"\n" for row in (*_ROWS, more, {"path": "e.png"}))


def _json_layouts() -> dict[str, bytes]:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "red"}]
    image = {"id": 1, "file_name": "a.png", "filename": "a.png", "filepath": "x", "split": "val"}
    asked = {"question_id": 70, "image_id": 7, "question": "How many?"}
    layouts = {
        "rows": list(_ROWS),
        "llava": [{"image": "a.png", "conversations": turns * 2}, {"conversations": turns}],
        "coco": {"images": [image], "annotations": [{"image_id": 1, "caption": "a star"}]},
        "karpathy": {"images": [{**image, "sentences": [{"raw": "a star"}, {"raw": "it is red"}]}]},
        "vqa": {"data_subtype": "val2014", "questions": [{"question_id": 1, "image_id": 2, "question": "What?"}]},
        "names": {"a.png": "a star", "b.png": ["one", "two"], "c.png": {"question": "What?", "answer": "x"}},
        "kohya": {"a": {"caption": "a star", "tags": "star, red"}},
        "texts": ["What?", "Why?"],
        "vizwiz": [{"image": "a.png", "question": "<image>\nWhat?", "answers": [{"answer": "a"}, {"answer": "b"}]}],
        "pope": {"image": "a.jpg", "text": "Is it red?", "label": "yes"},
        "answers": {"questions": [asked], "annotations": [{**asked, "answers": [{"answer": "2"}, "two"]}]},
        "science": {"1": {"question": "Which?", "choices": ["a", "b"], "answer": 0, "image": "i.png", "split": "val"}},
    }
    return {name: json.dumps(value).encode() for name, value in layouts.items()}


def _archives() -> dict[str, bytes]:
    members = {"s/1.png": b"p" * 600, "s/1.json": b'{"a": 1, "b": [2]}', "s/1.txt": b"caption"}
    members |= {"s/2.jpg": b"", "s/2.txt": b"0 0.5 0.5 1 1e-05\n", "s/.x.png": b"h"}
    long = {"d" * 120 + "/" + "n" * 150 + ".png": b"z", "f\u00e9.png": b"u"}
    plain = tar_bytes(members)
    return {
        "pax": plain,
        "gnu": tar_bytes(members | long, format=tarfile.GNU_FORMAT),
        "long": tar_bytes(long),
        "gzip": gzip.compress(plain, mtime=0),
        "bzip2": tar_bytes(members, mode="w:bz2"),
        "xz": tar_bytes(members, mode="w:xz"),
    }


_WORDS = (
    *words("picture image file_name path prompt question instruction input choices yes,no a,a"),
    *("img_name", "url", "train", "answers", "file://a%20b", "a\\b", "<image>", "['a']", "data:,"),
    *('["a", "b"]', "[", "{x}", "http://h/a.png", ["a", "b"], [1, 2], "a\0b"),
)
_cells = either(
    mutated_lines(
        mutated_bytes(b'"', b",", b"\t", b'""', b"\r", b"\n", b"\xef\xbb\xbf", b"\xff", b"\0", b"picture", b"prompt")
    ),
    mutated_bytes(b'"', b",", b"\t", b'"\n', b"\r\n", b"\xff\xfe", b"\xed\xa0\x80"),
)
_text = mutated_lines(
    mutated_bytes(b"# ", b"#", b"\0", b"\r", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b" ", b"./", b"\x1b[2J")
)
_SHEET = "Is it red?\n# a comment\n\nWhat is größer?\n".encode()
_LISTS = {
    "lines": b"a.png\n# no\n\xff.png\r\n./# 1.jpg\n",
    "find": b"a.png\0b\nc.png\0",
    "spelt": b"a\\b.png\nfile:///a%20b\nc.\xc3\xa9\n",
}
_LAYOUT_WORDS = words(
    "images annotations sentences raw questions image_id conversations from answers label caption split hint subject"
)
_table = {suffix: partial(table, suffix=suffix) for suffix in ("jsonl", "csv", "tsv", "json")}
TARGETS = (
    Target("table-jsonl", _table["jsonl"], lambda: {"rows": _as_jsonl()}, mutated_lines(mutated_json(*_WORDS))),
    Target("table-csv", _table["csv"], lambda: {"rows": _as_cells(",")}, _cells),
    Target("table-tsv", _table["tsv"], lambda: {"rows": _as_cells("\t")}, _cells),
    Target("table-json", _table["json"], _json_layouts, mutated_json(*_WORDS, *_LAYOUT_WORDS)),
    Target("known-sets", known_sets, _json_layouts, mutated_json(*_WORDS, *_LAYOUT_WORDS)),
    Target("sheet", sheet, lambda: {"questions": _SHEET}, _text),
    Target("list", names, lambda: _LISTS, _text),
    Target("tar", tar, _archives, mutated_tar),
)
