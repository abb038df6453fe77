"""Every form of data becomes examples, and each problem in the data is reported by name."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.learning.labelled.checks import data_digest
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import Columns
from llama_adapter.app.pictures.inputs import InputsError
from tests.app.learning.labelled.tables import brief, reasons, write_lines
from tests.app.pictures.inputs.files import fill, tar_bytes


def test_folders_are_classes(tmp_path: Path) -> None:
    fill(tmp_path, "cat/2.png", "cat/10.png", "dog/deep/a.jpg", "dog/b.jpg")
    found = read_examples(str(tmp_path))

    assert [brief(one, folder=tmp_path) for one in found.examples] == [
        ("cat/2.png", None, "choice", ("cat",)),
        ("cat/10.png", None, "choice", ("cat",)),
        ("dog/b.jpg", None, "choice", ("dog",)),
        ("dog/deep/a.jpg", None, "choice", ("dog",)),
    ]
    assert {example.choices for example in found.examples} == {("cat", "dog")}
    assert found.examples[0].digest == hashlib.sha256(b"cat/2.png").hexdigest()
    assert not found.problems


def write(folder: Path, *names: str) -> None:
    """Write pictures, and archives that have one with their name as its text."""
    for name in names:
        fill(folder, name)
        if name.endswith(".tar"):
            text = name.removesuffix(".tar").encode()
            (folder / name).write_bytes(tar_bytes({"0.png": text, "0.txt": text}))


SHARDS = {"train-0000": "train", "train-0001": "train", "val-0000": "validation"}
NAMES = [f"{name}.tar" for name in SHARDS]
KINDS = ("cat", "dog")


@pytest.mark.parametrize(
    ("names", "paths", "expected"),
    [
        (
            [f"{split}/{kind}/{split}.png" for split in ("train", "val") for kind in KINDS],
            [""],
            [(kind, split) for split in ("train", "validation") for kind in KINDS],
        ),
        (["train/a.png", "train/b.png", "car/c.png"], [""], [("car", ""), ("train", ""), ("train", "")]),  # classes
        (
            ["train/deep/a.png", "train/deep/a.txt", "val/b.png", "val/b.txt"],  # a text is its own name
            [""],
            [("train/deep/a.txt", "train"), ("val/b.txt", "validation")],
        ),
        *((NAMES, paths, [*SHARDS.items()]) for paths in ([""], ["*.tar"], NAMES)),
        (
            ["train/train-0.tar", "train/test-0.tar", "val/a.tar"],
            [""],
            [("train/test-0", "train"), ("train/train-0", "train"), ("val/a", "validation")],
        ),
        (
            [f"{split}.tar/{kind}/1.png" for split in ("train", "test") for kind in KINDS],  # folders
            ["train.tar", "test.tar"],
            [("cat", ""), ("dog", "")] * 2,
        ),
    ],
)
def test_folders_and_archives_are_splits_if_all_are_named_so(
    names: list[str], paths: list[str], expected: list[Any], tmp_path: Path
) -> None:
    write(tmp_path, *names)
    found = read_examples(*(str(tmp_path / path) for path in paths))
    assert [(one.answers[0], one.split) for one in found.examples] == expected


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("STRASSE", "Straße", "their case"),
        ("caf\u00e9", "cafe\u0301", "case, white space or encoding"),  # as macOS writes names
        ("Caf\u00e9", "cafe\u0301", "case, white space or encoding"),
        ("red cat", "red \u00a0cat", "case, white space or encoding"),
        ("10", "\uff11\uff10", "case, white space or encoding"),  # full-width digits
    ],
)
def test_labels_that_look_alike_are_told(one: str, other: str, differ: str, tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    rows = [{"question": f"{number}?", "label": label} for number, label in enumerate((one, one, other, other))]
    table.write_text("\n".join(map(json.dumps, rows)))
    found = read_examples(str(table))

    [reason] = [problem.reason for problem in found.problems]
    assert reason.endswith(f" differ by {differ} alone")


@pytest.mark.parametrize("inside", ["cat/a.png", "metadata.jsonl", "shard.tar"])
def test_a_misspelt_folder_of_a_split_is_no_class(inside: str, tmp_path: Path) -> None:
    for split in ("train", "Tset"):
        fill(tmp_path, f"{split}/{inside}")
    with pytest.raises(InputsError, match=r"Wanted only folders of splits beside `.*train`, got `Tset`") as raised:
        read_examples(str(tmp_path))
    assert "did you mean test?" in raised.value.hint


def test_results_beside_classes_are_none_and_classes_that_differ_by_case_are_told(tmp_path: Path) -> None:
    fill(tmp_path, "cat/a.png", "cat/b.png", "Cat/c.png", "Cat/d.png", "pets.training/curves.png", "scores/e.png")
    (tmp_path / "pets.training" / "data.json").touch()
    (tmp_path / "scores" / "outcomes.jsonl").touch()
    found = read_examples(str(tmp_path))

    assert sorted({example.answers for example in found.examples}) == [("Cat",), ("cat",)]
    assert reasons(found, folder=tmp_path.parent) == [
        f"warning: {tmp_path.name}: its labels Cat and cat differ by their case alone"
    ]


def test_what_is_wrong_with_folders_of_classes(tmp_path: Path) -> None:
    fill(tmp_path, "cat/a.png", "cat/b.png", "dog/c.png", "outside.png")
    (tmp_path / "empty").mkdir()
    found = read_examples(str(tmp_path))

    assert reasons(found, folder=tmp_path.parent) == [
        f"{tmp_path.name}/empty: the folder of this class has no pictures",
        f"{tmp_path.name}: pictures outside of the folders of classes: 1",
        f"warning: {tmp_path.name}/dog/c.png: the class dog has one example, so it cannot be both learnt and held out",
    ]


def test_several_data_with_classes_in_common_are_told_that_each_has_its_own(tmp_path: Path) -> None:
    names = ("cat/a", "cat/b", "dog/c", "dog/d")
    fill(tmp_path, *(f"mon/{name}.png" for name in (*names, "ox/e", "ox/f")), *(f"tue/{name}g.png" for name in names))
    fill(tmp_path, *(f"wed/{name}.png" for name in ("red/h", "red/i", "blue/j", "blue/k")))
    days = [str(tmp_path / day) for day in ("mon", "tue", "wed")]
    each, every = read_examples(*days), read_examples(str(tmp_path / "*"))

    assert {one.choices for one in each.examples} == {("cat", "dog", "ox"), ("cat", "dog"), ("blue", "red")}
    [told] = [problem for problem in each.problems if "its classes" in problem.reason]
    assert (told.place, told.is_warning) == (days[1], True)
    assert f"are not those of {days[0]}" in told.reason
    assert {one.choices for one in every.examples} == {("blue", "cat", "dog", "ox", "red")}
    assert not every.problems
    assert not [one for one in read_examples(days[1], days[1]).problems if "its classes" in one.reason]


@pytest.mark.parametrize(("split", "num_told"), [("", 2), ("test", 0)])
def test_a_class_of_one_example_is_told_unless_the_data_name_the_splits(
    split: str, num_told: int, tmp_path: Path
) -> None:
    fill(tmp_path, "a.png", "b.png")
    (tmp_path / "copy.png").write_bytes(b"a.png")
    rows = ("a.png,cat", "b.png,dog", "copy.png,cat")
    (tmp_path / "labels.csv").write_text("picture,label,split\n" + "".join(f"{row},{split}\n" for row in rows))

    assert len(reasons(read_examples(str(tmp_path / "labels.csv")), folder=tmp_path)) == num_told


def test_choices_of_the_command_are_those_of_folders_also_as_another_system_spells_them(tmp_path: Path) -> None:
    fill(tmp_path, "cafe\u0301/a.png", "BAR/b.png", "x2/c.png")  # as macOS writes names
    found = read_examples(str(tmp_path), columns=Columns(choices=("caf\u00e9", "bar", "x\u00b2")))

    assert sorted((example.answers, example.choices) for example in found.examples) == [
        ((answer,), ("caf\u00e9", "bar", "x\u00b2")) for answer in ("bar", "caf\u00e9")
    ]
    (told,) = (problem.reason for problem in found.problems if not problem.is_warning)
    assert told.startswith("its label 'x2' is none of caf\u00e9, bar, x\u00b2")


@pytest.mark.parametrize("key", ["001", "other"])
def test_keys_of_captions_are_names_if_there_is_such_a_picture(key: str, tmp_path: Path) -> None:
    fill(tmp_path, "001.png", "b.png")
    (tmp_path / "meta.json").write_text(json.dumps({key: {"caption": "a cat", "filename": "b.png"}}))
    (found,) = read_examples(str(tmp_path / "meta.json")).examples
    assert found.item.source == str(tmp_path / ("001.png" if key == "001" else "b.png"))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives_have_samples(tmp_path: Path, mode: str) -> None:
    members = {
        "1.png": b"1", "1.txt": b"A red star.",
        "2.png": b"2", "2.json": b'{"question": "Colour?", "answer": "red"}',
        "3.png": b"3",
    }  # fmt: skip
    path = tmp_path / "data.tar"
    path = path if mode == "w" else path.with_suffix(".tar.gz")
    path.write_bytes(tar_bytes(members, mode=mode))
    found = read_examples(str(path))

    assert [brief(one, folder=path) for one in found.examples] == [
        ("1.png", None, "caption", ("A red star.",)),
        ("2.png", "Colour?", "answer", ("red",)),
    ]
    assert [example.digest for example in found.examples] == [hashlib.sha256(name).hexdigest() for name in (b"1", b"2")]
    assert found.left_out.note() == f"pictures without text: 1 (first: {path}/3.png)"


@pytest.mark.parametrize("data", ["a.tar", "rows.jsonl"])
def test_two_pictures_of_an_archive_with_one_name_are_an_error(tmp_path: Path, data: str) -> None:
    """Records distinguish them by content, but a table that names them cannot."""
    members = {"1.png": b"1", "1.txt": b"A star.", "2.png": b"2", "2.txt": b"A ring.", "./1.png": b"3", "./1.txt": b"?"}
    members["3.txt"] = b"A moon."
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    write_lines(tmp_path / "rows.jsonl", *({"picture": f"a.tar/{name}.png", "text": name} for name in "12"))
    found = read_examples(str(tmp_path / data))

    assert [example.item.label.rpartition("/")[2] for example in found.examples] == ["2.png"]
    assert reasons(found, folder=tmp_path) == [
        "a.tar/1.png: the archive has two pictures of this name, which a table could not tell apart"
    ] + ["warning: left out of the data: samples without a picture: 1 (first: a.tar/3)"] * (data == "a.tar")


def test_a_name_that_all_pictures_of_an_archive_have_is_its_error(tmp_path: Path) -> None:
    names = ("1.png", "1.txt", "1.seg.png", "./1.png", "./1.txt")
    (tmp_path / "a.tar").write_bytes(tar_bytes(dict.fromkeys(names, b"?")))
    found = read_examples(str(tmp_path / "a.tar"))

    assert reasons(found, folder=tmp_path)[0].startswith("a.tar/1.png: the archive has two pictures of this name")


@pytest.mark.parametrize("by", ["folder", "pattern"])
def test_classes_of_archives_are_those_of_all_of_them(tmp_path: Path, by: str) -> None:
    for name in ("cat", "dog"):
        members = {
            f"{name}{index}.{kind}": f"{name}{index}".encode() if kind == "png" else name.encode()
            for index in (1, 2)
            for kind in ("png", "cls")
        }
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes(members))
    found = read_examples(str(tmp_path / "*.tar") if by == "pattern" else str(tmp_path))

    assert [example.answers[0] for example in found.examples] == ["cat", "cat", "dog", "dog"]
    assert {example.choices for example in found.examples} == {("cat", "dog")}
    assert not found.problems


@pytest.mark.parametrize("is_above", [False, True])
def test_metadata_of_hugging_face_may_lie_above_the_folders_of_splits_and_others(
    is_above: bool, tmp_path: Path
) -> None:
    fill(tmp_path, "train/deep/a.png", "test/b.png", *(["others/c.png"] if is_above else []))
    names = {"train": "deep/a.png", "test": "b.png"}
    if is_above:
        rows = [{"file_name": f"{split}/{name}", "text": "A.", "split": split} for split, name in names.items()]
        write_lines(tmp_path / "metadata.jsonl", *rows)
    else:
        for split, name in names.items():
            write_lines(tmp_path / split / "metadata.jsonl", {"file_name": name, "text": "A."})
    found = read_examples(str(tmp_path))

    assert {(brief(one, folder=tmp_path)[0], one.split) for one in found.examples} == {
        ("test/b.png", "test"),
        ("train/deep/a.png", "train"),
    }


def test_missing_and_empty_pictures_are_told_by_name(tmp_path: Path) -> None:
    fill(tmp_path, "a.png")
    (tmp_path / "empty.png").touch()
    rows = [{"picture": f"{name}.png", "question": q, "answer": "red"} for name in ("a", "b", "empty") for q in "?!"]
    found = read_examples(str(write_lines(tmp_path / "data.jsonl", *rows)))

    assert len(found.examples) == 2
    table = write_lines(tmp_path / "tables" / "metadata.jsonl", rows[0])
    for path in (table, table.parent):
        elsewhere = read_examples(str(path), columns=Columns(picture_folder=str(tmp_path)))
        assert [one.item.source for one in elsewhere.examples] == [str(tmp_path / "a.png")]
    missing, empty = reasons(found, folder=tmp_path)
    assert missing == "data.jsonl, line 3: its picture b.png does not exist"
    assert empty.startswith("data.jsonl, line 5: Wanted a picture, got zero bytes")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"caption": "Caption a."}, {"caption": "Caption b."}], []),
        (
            [{"answer": "red", "split": "train"}, {"answer": "red", "split": "test"}],
            ["warning: the splits of the data: pictures that are in test and train: 1"],
        ),
        (
            [{"question": "Red?", "answer": "yes"}, {"question": "Red?", "answer": "no"}],
            [
                "data.jsonl, line 2: b.png is a copy of a.png, with the same question as data.jsonl, line 1, with the "
                "answer no in place of yes"
            ],
        ),
    ],
)
def test_copies_may_have_other_captions_and_no_other_answers_and_are_told_in_two_splits(
    rows: list[dict[str, str]], told: list[str], tmp_path: Path
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"same")
    named = ({"picture": f"{name}.png", **row} for name, row in zip("ab", rows, strict=True))
    found = read_examples(str(write_lines(tmp_path / "data.jsonl", *named)))

    assert reasons(found, folder=tmp_path) == told


@pytest.mark.parametrize("name", ["nowhere", "notes.txt", "bare", "no/*.jsonl"])
def test_other_paths_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("?")
    fill(tmp_path, "bare/a.png")

    with pytest.raises(InputsError, match="Wanted"):
        read_examples(str(tmp_path / name))


AS_PARQUET = "write its rows as Parquet: datasets.load_from_disk reads them, and to_parquet writes each split"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["images/a.png", "labels.jsonl"], "name the table itself: {0}/labels.jsonl"),
        (["images/a.png", "labels.jsonl", "eval.csv", "train.csv"], "name the table itself: {0}/train.csv"),
        (["images/a.png", "a.csv", "a.png"], "name the table itself: {0}/a.csv"),
        (["images/a.png", "a.csv", "b.json", "b.png", "c.png.json", "c.png"], "name the table itself: {0}/a.csv"),
        (["images/a.png", "eval.csv", "train.csv"], "name the tables themselves: {0}/train.csv {0}/eval.csv"),
        # As in repositories of the Hugging Face Hub, and in what `save_to_disk` of the `datasets` library writes.
        (["README.md", "data/test-0-of-1.parquet", "infos.json"], "name the tables: '{0}/data/*.parquet'"),
        (["a[1]/train-0.parquet", "b/train-0.parquet", ".cache/c.parquet"], "name the tables: '{0}/a[[]1]/*.parquet'"),
        (["a.training/data.json", "a.training/a.parquet", "b/c.parquet"], "name the tables: '{0}/b/*.parquet'"),
        (["a.csv", "1.png", "b/c.parquet"], "name the table itself: {0}/a.csv"),
        (["state.json", "data-0.arrow"], AS_PARQUET),
        (["dataset_dict.json", "train/state.json", "train/data-0.arrow"], AS_PARQUET),
    ],
)
def test_a_folder_with_tables_says_what_to_do_with_them(names: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(InputsError, match="none of these") as refused:
        read_examples(str(fill(tmp_path, *names)))
    assert refused.value.hint == told.format(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["cats/1.jxl", "cats/a.parquet", "dogs/1.jxl"],
        ["cats/a.csv", "dogs/.keep", "info.json"],
        ["cats/@eaDir/1.png", "dogs/a.parquet"],
    ],
)
def test_classes_without_pictures_are_told_so(names: list[str], tmp_path: Path) -> None:
    found = read_examples(str(fill(tmp_path, *names)))
    assert {one.place: one.reason for one in found.problems if not one.is_warning} == {
        str(tmp_path / name): "the folder of this class has no pictures" for name in ("cats", "dogs")
    }


@pytest.mark.parametrize(
    ("names", "are_splits"),
    [
        (("train.csv", "TEST.csv"), True),
        (("train.txt", "TEST.txt"), True),  # the suffix does not decide
        (("train-00000-of-00001.csv", "test-00000-of-00001.csv"), True),
        (("pets_train.csv", "pets_test.csv"), True),
        (("trainer.csv", "tests.csv"), False),
        (("train_station.csv", "crash_test.csv"), False),
        (("train.csv", "more.csv"), False),
    ],
)
def test_tables_that_are_named_as_splits_are_these_splits(
    names: tuple[str, str], are_splits: bool, tmp_path: Path
) -> None:
    fill(tmp_path, *(f"{number}.png" for number in range(3)))
    first, second = (tmp_path / name for name in names)
    first.write_text("picture,label,split\n0.png,cat,\n1.png,dog,val\n")
    second.write_text("picture,label\n2.png,cat\n")  # a class alone, if it is no split of the first table
    found = read_examples(str(first), str(second))

    assert [one.split for one in found.examples] == (
        ["train", "validation", "test"] if are_splits else ["", "validation"]
    )
    assert {one.choices for one in found.examples} == {("cat", "dog")}
    assert [one.reason for one in found.problems if not one.is_warning] == (
        [] if are_splits else ["all its labels are cat; wanted at least two classes"]
    )


def test_large_compressed_archives_are_to_be_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.app.learning.labelled.pictures.MAX_COMPRESSED_BYTES", 5)
    members = {f"{name}.{kind}": b"four" for name in "ab" for kind in ("png", "txt")}
    for name, mode in (("a.tar.gz", "w:gz"), ("a.tar", "w")):
        (tmp_path / name).write_bytes(tar_bytes(members, mode=mode))

    assert len(read_examples(str(tmp_path / "a.tar")).examples) == 2
    with pytest.raises(InputsError, match="at most 5 bytes"):
        read_examples(str(tmp_path / "a.tar.gz"))


def test_the_digest_of_data_goes_by_pictures_and_answers(tmp_path: Path) -> None:
    def digest(*rows: dict[str, str]) -> str:
        return data_digest(read_examples(str(write_lines(tmp_path / "data.jsonl", *rows))).examples)

    for name in ("a.png", "copy.png"):
        (tmp_path / name).write_bytes(b"same")
    fill(tmp_path, "b.png")
    one, two = ({"picture": f"{name}.png", "answer": name} for name in "ab")

    assert digest(one, two) == digest(two, {**one, "picture": "copy.png"})
    assert digest(one, two) != digest(one, {**two, "answer": "a"})
    assert digest(one, two) != digest(one)
