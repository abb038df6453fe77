"""Folders and archives as people have them: one picture a sample, and a note on whatever is left out."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import Columns
from llama_adapter.app.pictures.inputs import InputsError, InputSpec, read_inputs
from llama_adapter.app.pictures.inputs.items import LeftOut
from tests.app.command import Run

HERE = Path(__file__).parent
COLORS = ("red", "blue", "green")
TEXTS = [f"a large {COLORS[number % 3]} circle" for number in range(6)]
SAMPLES = [(f"s{number}.png", (text,)) for number, text in enumerate(TEXTS)]
NAMED = [(f"s{number}.input.png", (text,)) for number, text in enumerate(TEXTS)]


def job(*paths: Path, **settings: object) -> tuple[list[str], str]:
    """The names that a job reads, and what it leaves out."""
    left_out = LeftOut()
    spec = InputSpec(paths=tuple(map(str, paths)), **{"recursive": True, **settings})  # type: ignore[arg-type]
    return [os.path.basename(item.label) for item in read_inputs(spec, left_out=left_out)], left_out.note()


def data(path: Path, *fields: str) -> tuple[list[tuple[str, tuple[str, ...]]], str]:
    """Names and answers of labelled data, and what is left out."""
    found = read_examples(str(path), columns=Columns(fields=fields))
    assert not [problem for problem in found.problems if not problem.is_warning]
    return [(os.path.basename(one.item.label), one.answers) for one in found.examples], found.left_out.note()


@pytest.mark.parametrize(
    ("name", "fields", "right", "left_out"),
    [
        ("webdataset/dots.tar", (), [("scan 22.05.png", ("a red one",)), ("scan 22.06.png", ("a blue one",))], ""),
        ("webdataset2/mask.tar", (), SAMPLES, "second pictures of a sample: 6"),
        ("webdataset2/named-fields.tar", ("input", "outputs"), NAMED, ""),
        ("webdataset2/wds-multiline.tar", (), [(n, (*a, f"{a[0]} on white")) for n, a in SAMPLES], ""),
        ("hf-extra", (), [(name[1:], texts) for name, texts in SAMPLES], "pictures without a row: 2"),
    ],
)
def test_samples_have_one_picture_each(
    name: str, fields: tuple[str, ...], right: list[tuple[str, tuple[str, ...]]], left_out: str
) -> None:
    found, note = data(HERE / name, *fields)
    assert found == right
    assert (note.startswith(left_out), bool(note)) == (True, bool(left_out))
    if name.endswith(".tar"):
        assert job(HERE / name, sample_fields=fields)[0] == [picture for picture, _ in right]


@pytest.mark.parametrize(
    ("name", "fields", "seen"),
    [
        ("named-fields.tar", (), "input.png, outputs.txt"),
        ("mask.tar", ("depth", "txt"), "png, seg.png, txt"),
    ],
)
def test_fields_are_said_with_the_flag_that_chooses_them(name: str, fields: tuple[str, ...], seen: str) -> None:
    with pytest.raises(InputsError, match=rf"fields {seen}(.|\n)*--sample-fields"):
        data(HERE / "webdataset2" / name, *fields)
    if fields:
        (item,) = read_inputs(InputSpec(paths=(str(HERE / "webdataset2" / name),), sample_fields=fields))
        assert item.error.message.endswith(f"but it has none in the field depth: it has {seen}.")


def test_thumbnails_of_a_nas_are_no_photographs(run: Run) -> None:
    names, note = job(HERE / "nas")
    assert (names, note.partition(" (")[0]) == (["a.png"], "folders of thumbnails: 1")
    assert job(HERE / "nas", recursive=False) == (["a.png"], "")
    assert job(HERE / "nas" / "@eaDir")[0] == ["SYNOPHOTO_THUMB_M.jpg"]  # the user names it
    assert "left out: folders of thumbnails: 1" in run("caption", str(HERE / "nas"), "--recursive").err


def tree(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def test_texts_beside_pictures_are_their_captions_and_no_classes(tmp_path: Path) -> None:
    cats = {"cats__1.png": b"1", "cats__1.txt": "a cat, sitting", "cats__4.png": b"4", "cats__readme.txt": "all mine"}
    dogs = {"10_dog__2.jpg": b"2", "10_dog__2.caption": "a dog\nit sits", "10_dog__3.webp": b"3"}
    dogs["10_dog__3.json"] = json.dumps({"question": "What?", "answer": "a dog"})
    others = {"1.png": b"5", "1.txt": "a cow", "1.json": json.dumps({"text": "a mouse"}), "1.jpg": b"6"}
    found = read_examples(str(tree(tmp_path, **cats, **dogs, **others, **{"4.json": "{}", "4.png": b"7"})))

    assert {os.path.basename(one.item.label): one.answers for one in found.examples} == {
        "1.jpg": ("a cow",),
        "1.png": ("a cat, sitting",),
        "2.jpg": ("a dog", "it sits"),
        "3.webp": ("a dog",),
    }
    note = found.left_out.note()
    counts = ("pictures without text: 3", "texts without an answer: 1", "texts without picture: 1")
    assert all(part in note for part in (*counts, "repeats in", "second texts")), note
    assert "names of folders, such as 10_dog, are not" in " ".join(map(str, found.problems))


def test_a_caption_that_is_no_choice_is_said_as_it_stands_beside_its_picture(tmp_path: Path) -> None:
    folder = tree(tmp_path, **{"1.png": b"1", "1.txt": "bird\n"})
    (problem,) = read_examples(str(folder), columns=Columns(choices=("cat", "dog"))).problems
    assert problem.reason == "its caption ['bird'] is none of cat, dog"


def test_classes_stay_classes_beside_other_programs_values(tmp_path: Path) -> None:
    files = {f"{name}__{number}.png": name + str(number) for name in ("cat", "dog") for number in range(2)}
    values = {name.replace(".png", ".json"): '{"camera": "x"}' for name in files} | {"dog__1.json": "{"}
    folder = tree(tmp_path, **files, **values)
    (folder / "cat" / "notes.txt").symlink_to("/proc/self/mem")  # reading it fails
    found = read_examples(str(folder))
    assert [one.answers for one in found.examples] == [("cat",), ("cat",), ("dog",), ("dog",)]


def test_boxes_beside_pictures_are_no_captions_and_a_circle_of_links_ends(tmp_path: Path) -> None:
    boxes = "0 0.5 0.5 0.25 1e-05\n12 0.1 .2 0.3 1\n3 1 1 1.000000 0.5 0.2 0.3 2\n"
    folder = tree(tmp_path, **{"a__1.png": b"1", "a__1.txt": boxes, "b__2.png": b"2", "b__2.txt": "0 is a cat"})
    (folder / "a" / "again").symlink_to(folder)
    elsewhere = tree(tmp_path.with_name("elsewhere"), **{"3.png": b"3", "3.txt": "a dog"})
    for name in ("linked", "twice"):
        (folder / name).symlink_to(elsewhere)

    found, note = data(folder)
    assert found == [("2.png", ("0 is a cat",)), ("3.png", ("a dog",))]
    assert f"folders that are linked twice: 2 (first: {folder}/a/again)" in note
    assert "pictures without text: 1" in note
    assert "texts without an answer: 1" in note
    (folder / "b" / "2.txt").unlink()
    for name in ("linked", "twice"):
        (folder / name).unlink()
    assert [one.answers for one in read_examples(str(folder)).examples] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("1.txt", "06 12 34 56 78"),
        ("1.txt", "1 2 3 4 5"),
        ("1.txt", "1 0 1 2 1"),
        ("1.txt", "7 3.5 0.5 0.5 0.5"),
        ("1.caption", "0 0.5 0.5 0.25 1e-05"),
    ],
)
def test_numbers_that_are_no_boxes_are_captions(name: str, text: str, tmp_path: Path) -> None:
    assert data(tree(tmp_path, **{"1.png": b"1", name: text})) == ([("1.png", (text,))], "")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("seg_train", "seg_test", "seg_pred"), "seg_test, seg_train seem to be splits, not classes"),
        (("training_set", "test_set"), "test_set, training_set seem to be splits, not classes"),
        (("train2017", "val2017"), "train2017, val2017 seem to be splits, not classes"),
        (("train_1", "test_1"), "test_1, train_1 seem to be splits, not classes"),
        (("train_station", "crash_test", "car", "bus"), None),
        (("test tube", "test strip"), None),
        (("train ticket", "test strip"), None),
        (("dataset",), "all its labels are dataset"),
    ],
)
def test_folders_above_classes_are_no_classes(names: tuple[str, ...], told: str | None, tmp_path: Path) -> None:
    paths = [f"{name}__{kind}__{number}.png" for name in names for kind in "ab" for number in "12"]
    problems = read_examples(str(tree(tmp_path, **{path: path for path in paths}))).problems
    said = [str(one).partition(": ")[2].partition(";")[0] for one in problems]
    assert said[:1] == ([told] if told else [])


def test_pictures_that_are_not_read_are_counted(tmp_path: Path) -> None:
    raw = ("IMG_1.CR2", "IMG_1.JPG", "b.jxl", "._c.dng", "sub__d.nef", "e.mov", "f.HIF")
    folder = tree(tmp_path, **{name: name for name in raw})
    assert job(folder, recursive=False)[1].startswith("pictures of kinds that are not read: 2 (first: ")
    names, note = job(folder)
    assert names == ["f.HIF", "IMG_1.JPG"]
    assert note.startswith("pictures of kinds that are not read: 3 (first: ")


@pytest.mark.parametrize("place", ["", "test/"])
@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ("metadata.csv", "", "tables beside and in the folders of classes: 1"),
        ("metadata.csv", "metadata.jsonl", "tables beside and in the folders of classes: 2"),
        # Of albums of photographs.
        ("metadata.json", "metadata.json", "tables beside and in the folders of classes: 2"),
        ("@eaDir/metadata.csv", ".x/metadata.csv", "folders of thumbnails: 1"),
        ("a.training/metadata.csv", "x/metadata.csv", ""),
        ("../rows.jsonl", "", "tables beside and in the folders of classes: 1"),
    ],
)
def test_classes_with_tables_stay_classes(place: str, first: str, second: str, note: str, tmp_path: Path) -> None:
    files = {f"{place}cats/1.png": "1", f"{place}dogs/1.png": "2", f"{place}cats/a.training/data.json": "{}"}
    tables = [f"{place}{name}" for name in (f"cats/{first}", f"dogs/{second}") if not name.endswith("/")]
    found = read_examples(str(tree(tmp_path, **files, **dict.fromkeys(tables, "file_name,text\n1.png,a\n"))))
    assert [one.answers for one in found.examples] == [("cats",), ("dogs",)]
    assert (found.left_out.note()[: len(note)], bool(found.left_out)) == (note, bool(note))


@pytest.mark.parametrize("place", ["", "train/"])
@pytest.mark.parametrize("table", ["classes.json", "cats/a.parquet"])
def test_classes_may_be_links_beside_tables(place: str, table: str, tmp_path: Path) -> None:
    real, folder = tree(tmp_path / "real", **{"cats/1.png": "1", "dogs/1.png": "2"}), tmp_path / "linked"
    (folder / place).mkdir(parents=True)
    for name in ("cats", "dogs"):
        (folder / place / name).symlink_to(real / name)
    (folder / place / table).write_text("{}")
    assert [one.answers for one in read_examples(str(folder)).examples] == [("cats",), ("dogs",)]


def test_the_tables_of_albums_are_named_by_a_pattern(tmp_path: Path) -> None:
    rows = {f"{name}__metadata.jsonl": json.dumps({"file_name": "1.png", "text": name}) for name in ("2023", "2024")}
    folder = tree(tmp_path, **rows, **{f"{name}__1.png": name for name in ("2023", "2024")})
    found = read_examples(str(folder / "*" / "metadata.jsonl"))
    assert [one.answers for one in found.examples] == [("2023",), ("2024",)]


@pytest.mark.parametrize("name", ["1", "1.png"])
def test_kohya_s_metadata_names_pictures_with_or_without_suffix(name: str, tmp_path: Path) -> None:
    metadata = {name: {"tags": "cat, sitting"}, "2": {"caption": "a dog", "tags": "dog"}}
    folder = tree(tmp_path, **{"1.png": b"1", "2.jpg": b"2", "metadata.json": json.dumps(metadata)})
    assert data(folder)[0] == [("1.png", ("cat, sitting",)), ("2.jpg", ("a dog",))]


@pytest.mark.parametrize("files", [{"cat__1.png": "1", "dog__2.png": "2"}, {"1.png": "1", "1.txt": "a cat"}])
def test_thumbnails_of_labelled_pictures_are_counted(files: dict[str, str], tmp_path: Path) -> None:
    found = read_examples(str(tree(tmp_path, **files, **{"@eaDir__1.png__T.jpg": "3"})))
    assert found.left_out.note().startswith("folders of thumbnails: 1 (first: ")


def test_a_text_belongs_to_the_picture_that_has_its_stem(tmp_path: Path) -> None:
    files = {"img.jpg": b"1", "img.jpg.png": b"2", "img.txt": "one", "img.jpg.txt": "two"}
    more = {"e.png": b"3", "e.txt": " \n", "e.caption": "three".encode("utf-16")}
    found = read_examples(str(tree(tmp_path, **files, **more)))

    answers = {os.path.basename(one.item.label): one.answers for one in found.examples}
    assert answers == {"img.jpg": ("one",), "img.jpg.png": ("two",), "e.png": ("three",)}
    assert found.left_out.note().startswith("texts without an answer: 1")


@pytest.mark.parametrize("to", ["sidecars", "xmp", "kohya", "metadata"])
def test_texts_that_are_written_are_read_back_and_other_names_are_said(tmp_path: Path, run: Run, to: str) -> None:
    """The three pictures of `same-stem` have one name without suffix, ignoring case."""
    folder, records = tmp_path / "shapes", tmp_path / "records.jsonl"
    shutil.copytree(HERE / "same-stem", folder)
    texts = run("caption", str(folder), "--out", str(records), "--format", "jsonl").texts()
    place = ["--out" if to in ("kohya", "metadata") else "--below", str(folder)]
    export = ["export-records", str(records), "--to", to, "--template", "shapeart, {text}, {stem} of {parent}", *place]
    said = run(export)

    assert said.code == 0
    renamed = re.search("2 texts got another name, such as `.*, because the usual name was taken", said.err)
    assert (renamed is not None) == (to == "sidecars")
    found = read_examples(str(folder))
    assert not found.left_out
    assert {str(one.item.source): one.answers for one in found.examples} == {
        picture: (f"shapeart, {text}, {Path(picture).stem} of shapes",) for picture, text in texts.items()
    }
    assert run(export, "--force").code == 0
    assert read_examples(str(folder)).examples == found.examples
