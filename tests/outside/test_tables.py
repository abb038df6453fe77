"""Tables and JSON as people have them: each gives the same pictures and questions to jobs and to labelled data."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.learning.labelled.example import Examples
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import Columns
from llama_adapter.app.pictures.inputs import InputsError, InputSpec, check_inputs, read_inputs
from llama_adapter.app.pictures.inputs.manifests import check_manifest
from llama_adapter.app.pictures.inputs.tables import check_table, read_rows
from llama_adapter.runtime.errors import ExitCode
from tests.app.command import Run
from tests.app.pictures.inputs.files import fill, message

HERE = Path(__file__).parent
COLOR = "What color is the circle?"
COLORS = ("red", "blue", "green")
ASKED = [("red.png", COLOR), ("blue.png", COLOR)]
CAPTIONS = [(f"{number}.png", None, f"a large {COLORS[number % 3]} circle") for number in range(6)]
DESCRIBED = [(name, "Describe", text) for name, _, text in CAPTIONS]
SINGLE = [(name, COLOR, COLORS[number % 3]) for number, (name, *_) in enumerate(CAPTIONS)]
# What `ask` reads: pictures with their questions, or words of the error of the whole file.
QUESTIONS: dict[str, Any] = {
    "tables/blank-image.csv": [("blank-image.csv:2", "its cell `image` is empty; correct that line."), ASKED[0]],
    "tables/blank-input.csv": ASKED,
    "tables/blank-question.csv": [ASKED[0], ("blue.png", None)],
    "tables/semicolon.csv": [("red.png", None)],
    "tables2/cp1252-captions.csv": "in UTF-8, but the cell `caption` of line 2",
    "tables2/cp1252.csv": "in UTF-8, but the cell `question` of line 2",
    "tables2/cr.csv": ASKED,
    "tables2/no-header-captions.csv": "names no known column: it holds red.png, a large red circle",
    "tables2/nohead.csv": f"names no known column: it holds red.png, {COLOR}",
    "tables2/semicolon-questions.csv": ASKED,
    "tables2/spaces.csv": ASKED,
    "tables2/trailing.csv": ASKED[:1],
}
# What labelled data hold: pictures with questions and first answers, or words of the error of the whole file.
ANSWERS: dict[str, Any] = {
    "tables/semicolon.csv": [("red.png", None, "a large red circle")],
    "tables2/cp1252-captions.csv": QUESTIONS["tables2/cp1252-captions.csv"],
    "tables2/no-header-captions.csv": QUESTIONS["tables2/no-header-captions.csv"],
    "json-sets/dict.json": CAPTIONS,
    "json-sets/karpathy.json": CAPTIONS,
    "json-sets/single.json": SINGLE,
    "hf-conv/metadata.jsonl": DESCRIBED,
    "hf-conv": DESCRIBED,
}
SAME = ("json-sets/dict.json", "json-sets/karpathy.json", "json-sets/single.json", "hf-conv/metadata.jsonl")
QUESTIONS |= {name: [row[:2] for row in ANSWERS[name]] for name in SAME}


def asked(path: Path) -> list[tuple[str, str | None]]:
    """The names and questions that a job reads; the fault of a row in place of a question."""
    spec = InputSpec(manifests=(str(path),))
    check_inputs(spec)
    return [
        (
            Path(item.label).name,
            message(item).partition(", but ")[2] if item.error else question and question.instruction,
        )
        for item in read_inputs(spec)
        for question in item.questions or (None,)
    ]


def answered(path: Path) -> list[tuple[str, str | None, str]]:
    found = read_examples(str(path))
    assert not [problem for problem in found.problems if not problem.is_warning]
    return [(Path(one.item.label).name, one.question.instruction, one.answers[0]) for one in found.examples]


def parquet(path: Path, rows: list[dict[str, Any]], *, info: dict[str, str] | None = None, **options: Any) -> Path:
    """Write rows as Parquet."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata(info)
    pyarrow.parquet.write_table(table, path, **options)
    return path


def examples(folder: Path, data: object) -> Examples:
    """What labelled data read from this JSON, without looking at pictures."""
    (folder / "t.json").write_text(json.dumps(data))
    return read_examples(str(folder / "t.json"), digests=False, looks=False)


@pytest.mark.parametrize(
    ("read", "name", "right"),
    [(read, *case) for read, cases in ((asked, QUESTIONS), (answered, ANSWERS)) for case in cases.items()],
)
def test_jobs_read_pictures_and_questions_and_labelled_data_answers_too(
    read: Callable[[Path], object], name: str, right: object
) -> None:
    if isinstance(right, str):
        with pytest.raises(InputsError) as refused:
            read(HERE / name)
        assert right in refused.value.message
    else:
        assert read(HERE / name) == right


def test_each_pair_of_turns_is_an_example_and_a_row_without_picture_a_text() -> None:
    found = read_examples(str(HERE / "json-sets" / "textrow.json")).examples
    first = json.loads((HERE / "json-sets" / "textrow.json").read_text(encoding="utf-8"))
    assert len(found) == sum(len(row["conversations"]) // 2 for row in first)
    texts = [one for one in found if one.item.source is None]
    assert len(texts) == sum("image" not in row for row in first) > 0


def test_questions_alone_are_no_labelled_data() -> None:
    with pytest.raises(InputsError, match="with one of the columns answer"):
        read_examples(str(HERE / "tables2" / "semicolon-questions.csv"))


def test_numbers_of_classes_in_parquet_become_their_names(tmp_path: Path) -> None:
    rows = [{"image": f"{label}.png", "label": label} for label in (0, 1, -1, 7)]  # -1: the label is missing
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = parquet(tmp_path / "t.parquet", rows, info={"huggingface": json.dumps({"info": {"features": features}})})

    found = read_examples(str(table), looks=False, digests=False)
    assert [one.answers for one in found.examples] == [("cat",), ("dog",), ("7",)]
    assert found.left_out.note().startswith("rows without an answer: 1")


def test_parquet_is_checked_by_its_schema_and_read_by_groups(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file, size = tmp_path / "t.parquet", 1 << 20
    rows = [{"Image": {"bytes": os.urandom(size), "path": f"{number}.jpg"}, "name": "x"} for number in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=1)
    before = pa.total_allocated_bytes()
    held = [pa.total_allocated_bytes() - before for _ in read_rows(str(file), what="table", wanted=["image"])]
    assert (len(held), max(held) < 5 * size) == (16, True)

    whole = file.read_bytes()
    file.write_bytes(whole[: 8 * size] + bytes(size) + whole[9 * size :])
    check_manifest(str(file))  # reads no rows
    read = list(read_rows(str(file), what="table"))
    assert [row.line for row in read] == list(range(1, 17))
    assert [row.line for row in read if "it cannot be read: the file is damaged (" in row.problem] == [8, 9]
    with pytest.raises(InputsError, match="one of the columns prompt"):
        check_manifest(str(file), needs_questions=True)
    with pytest.raises(InputsError, match="it holds image, name"):
        check_table(str(file), what="table", wanted=["question"])
    file.write_bytes(whole[:-9])
    with pytest.raises(InputsError, match="Wanted to read the manifest"):
        check_manifest(str(file))
    pq.write_table(pa.Table.from_pylist(rows).slice(0, 0), file)
    with pytest.raises(InputsError, match="which has none"):
        check_manifest(str(file))


def test_rows_of_parquet_that_cannot_be_read_leave_the_rest_to_a_job(tmp_path: Path, run: Run) -> None:
    red = (HERE / "tables" / "red.png").read_bytes()
    rows = [{"image": {"bytes": red, "path": f"{number}.png"}, "name": f"row-{number}"} for number in range(9)]
    file = parquet(tmp_path / "t.parquet", rows, row_group_size=3, compression="none", use_dictionary=False)
    file.write_bytes(file.read_bytes().replace(b"row-4", b"\xffow-4"))

    ran = run("caption", "--manifest", str(file), "--max-new-tokens", "2")
    failed = [line["error"]["message"] for line in ran.records if line["error"]]
    assert (ran.code, len(ran.records)) == (ExitCode.PICTURE_ERRORS, 7)
    assert len(failed) == 1
    assert "t.parquet:4`, but it and the rows up to 6 cannot be read: the file is damaged ('utf-8' codec" in failed[0]
    assert "1 failed" in ran.told


def test_pictures_may_be_inside_parquet(tmp_path: Path) -> None:
    picture = (HERE / "tables" / "red.png").read_bytes()
    rows = [{"image": {"bytes": picture, "path": "0.png"}, "text": "a circle"}, {"image": None, "text": "none"}]
    cells = (picture, b"P6 1 1 255 abc", b"%PDF-1.7 damaged", b"", b"a/red.png")
    bare = parquet(tmp_path / "b.parquet", [{"image": one, "text": "a circle"} for one in cells])
    inside = read_examples(str(bare))
    assert [one.item.source for one in inside.examples] == list(cells[:3])
    (name,) = [str(one) for one in inside.problems if one.unreadable is None]  # the rest need not stop a training
    assert name.endswith("line 5: its cell `image` holds the name of a file as bytes; write it as text")

    table = parquet(tmp_path / "train.parquet", rows)
    found = read_examples(str(table))
    assert [(one.item.source, one.answers) for one in found.examples] == [(picture, ("a circle",))]
    assert "it has neither a picture nor a question" in str(found.problems[0])
    assert asked(table)[0] == ("0.png", None)


@pytest.mark.parametrize("more", [{"question_id": 1}, {}])
def test_a_question_is_no_description(more: dict[str, int], tmp_path: Path) -> None:
    text, labels = "Is there a cat in the image?", {"a.png": "yes", "b.png": "no"}
    found = examples(
        tmp_path, [{**more, "image": name, "text": text, "label": labels[name]} for name in labels]
    ).examples
    told = [(one.question.instruction, one.answers, one.task) for one in found]
    assert told == [(text, (label,), "choice") for label in labels.values()]
    with pytest.raises(InputsError, match="most of its descriptions are questions"):
        examples(tmp_path, [{"image": f"{name}.png", "text": "Is it red?"} for name in "ab"])


ASKED_OF = {"question": "What is it?", "answer": "a liver"}


@pytest.mark.parametrize(
    ("data", "column"),
    [
        ([{"img_name": "xmlab1/source.jpg", **ASKED_OF}], "img_name"),  # SLAKE
        ([{"Figure_path": "PMC1_F1.JPG", **ASKED_OF}], "Figure_path"),  # PMC-VQA
        ({"info": {}, "questions": [{"image_filename": "CLEVR_0.png", **ASKED_OF}]}, "image_filename"),
        ([{"image_id": 262148, **ASKED_OF}], "image_id"),
        ([{"image_id": 0, **ASKED_OF}], "image_id"),
        ([{"url": "https://a.org/a.jpg", **ASKED_OF}], "url"),
        ([{"Image Name": "a.jpg", "caption": "a cat"}], "Image Name"),
        ([{"file_names": ["a.png", "b.png"], **ASKED_OF}], "file_names"),  # of the `datasets` library
        ([{"media": [{"path": "a.jpg", "bytes": None}], **ASKED_OF}], "media"),
        ([{"image_base64": "iVBORw0KGgo=", **ASKED_OF}], "image_base64"),
        ([{"photos": [{"path": "a.jpg"}], **ASKED_OF}], "photos"),
    ],
)
def test_a_picture_in_an_unknown_column_does_not_become_a_text(data: object, column: str, tmp_path: Path) -> None:
    with pytest.raises(InputsError, match="but its examples have none:") as refused:
        examples(tmp_path, data)
    (told,) = refused.value.details
    assert f"line 1: it has {column}, and no picture in a column picture, image" in told
    assert "call the column of the pictures `picture`" in told


@pytest.mark.parametrize(
    ("row", "has_other"),
    [
        ({"file": "a.py"}, False),
        ({"img_url": None}, False),
        ({"img_url": " ", "images": None}, False),
        ({"image_paths": [], "photos": []}, False),
        ({"photos": 0, "photo": 12, "image_data": False, "pictures": "none"}, False),
        ({"photos": 12}, False),
        ({"tags": ["a.png"], "files": ["readme.png"]}, False),
        ({"meta": {"path": "s.png"}, "attachments": [{"path": "s.png"}]}, False),
        ({"image_id": True}, False),
        ({"source": "a.png", "image": None}, True),
        ({"img_id": 1, "images": []}, True),
    ],
)
def test_a_text_may_say_that_it_has_no_picture(row: dict[str, Any], has_other: bool, tmp_path: Path) -> None:
    rows = [{**row, **ASKED_OF}, {"url": "a.png", "question": "Why?", "answer": "a"}, {"image": "b.png", **ASKED_OF}]
    found = examples(tmp_path, rows)
    assert [one.item.source for one in found.examples] == [None, f"{tmp_path}/b.png"]
    refused = [str(one).partition(", and")[0] for one in found.problems if not one.is_warning]
    assert refused == [f"{tmp_path}/t.json, line 2: it has url"]
    counted = f"other columns of pictures in rows whose picture is null: 1 (first: {tmp_path}/t.json, line 1)"
    assert found.left_out.note() == counted * has_other


def test_empty_cells_of_a_table_of_texts_name_no_picture(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("question;answer;img_url\nWhy?;so;\nHow?;thus; \n")
    found = read_examples(str(tmp_path / "t.csv"))
    assert [one.item.source for one in found.examples] == [None, None]
    assert not found.problems


@pytest.mark.parametrize(
    ("row", "question", "answers"),
    [
        ({"question": "Where?", "answers": "[1, 2, 30, 40]"}, "Where?", ("[1, 2, 30, 40]",)),
        ({"caption": "['a' 'b']"}, None, ("['a' 'b']",)),
        ({"answers": "[]"}, None, ("[]",)),
        ({"answer": '["a", "b"]'}, None, ('["a", "b"]',)),  # an answer in JSON
        ({"captions": "[] is a box"}, None, ("[] is a box",)),
        ({"captions": '["STOP" sign] on a pole'}, None, ('["STOP" sign] on a pole',)),
        ({"captions": ' ["a", "b", null]\n'}, None, ("a", "b")),
        ({"captions": ["a", "b", "b"]}, None, ("a", "b", "b")),  # training learns the user's first
        ({"question": "Which?", "answers": ["a", "b", "b"]}, "Which?", ("b", "b", "a")),
        ({"question": "What does <image> mean?", "answer": "a"}, "What does <image> mean?", ("a",)),
        ({"question": "What?\n<image>", "answer": "a"}, "What?", ("a",)),
        ({"question": "One.\n<image>\nTwo?", "answer": "a"}, "One.\nTwo?", ("a",)),
        ({"question": "One.\r\n<image>\r\nTwo?", "answer": "a"}, "One.\r\nTwo?", ("a",)),
        ({"question": "<image> <image>\nWhat?<image>\n<image>", "answer": "a"}, "What?", ("a",)),
        ({"question": " <image> ", "input": "Which <image> ?", "answer": "a"}, None, ("a",)),
        ({"questions": [{"question": "<image> What?", "answer": "a"}]}, "What?", ("a",)),
    ],
)
def test_texts_of_rows_are_kept(
    row: dict[str, Any], question: str | None, answers: tuple[str, ...], tmp_path: Path
) -> None:
    (found,) = examples(tmp_path, [{"image": "a.png", **row}]).examples
    assert (found.question.instruction, found.answers) == (question, answers)


def test_a_row_that_lacks_a_cell_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image;id;question;answer;remark\na.png;What is it?;a cat;sure\n")
    (problem,) = read_examples(str(tmp_path / "t.csv"), looks=False, digests=False).problems
    assert str(problem).endswith("line 2: it has 4 cells, and the first line has 5")


def test_captions_and_questions_are_not_lost_in_silence(tmp_path: Path) -> None:
    captions = [{"image_id": number, "caption": caption} for number, caption in ((1, "a"), (2, "b"))]
    found = examples(tmp_path, {"images": [{"id": 1, "file_name": "a.png"}], "annotations": captions})
    assert [len(found.examples), len(found.problems)] == [1, 1]

    turns = [{"from": role, "value": text} for role, text in (("human", "What?"), ("gpt", "red"), ("human", "Why?"))]
    found = examples(tmp_path, [{"image": "a.png", "conversations": turns}])
    assert [one.answers for one in found.examples] == [("red",)]
    assert found.left_out.note().startswith("questions of conversations without an answer: 1")
    found = examples(tmp_path, [{"image": "a.png", "conversations": [*turns[:2], turns[1]]}])
    assert "are no list of turns" in str(found.problems[0])


def test_lines_of_json_in_another_encoding_are_said_once_for_the_file(tmp_path: Path) -> None:
    rows = [{"image": "red.png", "question": "Où ?"}, {"image": "blue.png", "question": "Quoi ?"}]
    path = tmp_path / "t.jsonl"
    path.write_bytes("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode("cp1252"))

    with pytest.raises(InputsError, match="in UTF-8, but the cell `question` of line 1"):
        asked(path)


def test_a_verdict_of_prodigy_is_no_answer(tmp_path: Path) -> None:
    rows = [{"image": f"{n}.png", "caption": n, "_task_hash": 1, "answer": n} for n in ("accept", "reject", "ignore")]
    rows += [{"image": "a.png", "caption": "a", "_task_hash": 2}, {"image": "b.png", "answer": "b", "_task_hash": 3}]
    found = examples(tmp_path, rows)
    answers = [(one.answers[0], one.task) for one in found.examples]
    assert answers == [("accept", "caption"), ("a", "caption"), ("b", "answer")]
    assert found.left_out.note().startswith("rows that were not accepted: 2 (first: ")


def test_pictures_of_another_column_of_parquet_are_named(tmp_path: Path) -> None:
    red = (HERE / "tables" / "red.png").read_bytes()
    for name, value in (("img", red), ("jpg", {"bytes": red, "path": None})):
        table = parquet(tmp_path / "t.parquet", [{name: value, **ASKED_OF}])
        with pytest.raises(InputsError, match="its examples have none") as refused:
            read_examples(str(table))
        assert f"line 1: it has {name}, and no picture in a column" in refused.value.details[0]
    for value in (b"\xff\xd8", b"II*\0abc", {"bytes": b"RIFF\0\0\0\0WAVEfmt ", "path": "a.wav"}):
        table = parquet(tmp_path / "t.parquet", [{"embedding": value, **ASKED_OF}])
        assert [one.item.source for one in read_examples(str(table)).examples] == [None]


COCO = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "caption": "y"}]}
KARPATHY = {"images": [{"filename": "a.jpg", "filepath": "val2014", "sentences": [{"raw": "y"}]}]}
VQA = {
    "questions": [{"image_id": "a.jpg", "question_id": 1, "question": "q"}],
    "annotations": [{"question_id": 1, "answers": [{"answer": "y"}]}],
    "data_subtype": "val2014",
}


@pytest.mark.parametrize(
    ("data", "pictures", "folder"),  # the last picture is the right one
    [
        (COCO, ["a.jpg"], None),
        (COCO, ["val2017/a.jpg"], None),
        (COCO, ["a.jpg", "train2014/a.jpg"], None),
        (COCO, ["photos/a.jpg"], "photos"),
        (COCO, ["elsewhere/train2014/a.jpg"], "elsewhere"),
        *((data, [name], "photos") for data in (KARPATHY, VQA) for name in ("photos/a.jpg", "photos/val2014/a.jpg")),
    ],
)
def test_pictures_of_sets_are_found_in_their_folders_and_in_a_named_one(
    data: object, pictures: list[str], folder: str | None, tmp_path: Path
) -> None:
    table = tmp_path / "t.json"
    table.write_text(json.dumps(data))
    fill(tmp_path, *pictures)
    columns = Columns(picture_folder=folder and str(tmp_path / folder))
    found = read_examples(str(table), columns=columns, digests=False)
    assert [(one.item.source, one.answers) for one in found.examples] == [(str(tmp_path / pictures[-1]), ("y",))]


def test_a_picture_of_coco_that_is_nowhere_is_named_in_its_folder(tmp_path: Path) -> None:
    assert [one.item.source for one in examples(tmp_path, COCO).examples] == [str(tmp_path / "train2014" / "a.jpg")]


@pytest.mark.parametrize("names", [("Image", "image"), ("image", "Image"), (" Foo", "Foo"), ("Foo", " Foo")])
def test_the_exact_name_of_a_column_is_the_one_that_counts(names: tuple[str, str], tmp_path: Path) -> None:
    exact = "image" if "image" in names else "Foo"
    (tmp_path / "t.jsonl").write_text(json.dumps({name: repr(name) for name in names}))
    (row,) = read_rows(str(tmp_path / "t.jsonl"), what="table")
    assert row.values == {exact: repr(exact)}
