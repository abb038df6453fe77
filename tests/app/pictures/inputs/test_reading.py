"""From an input spec to its pictures: order, shards and counting."""

import hashlib
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llama_adapter.app.pictures.inputs import InputsError, InputSpec, check_inputs, count_inputs, read_inputs
from llama_adapter.app.pictures.inputs.items import LeftOut
from tests.app.pictures.inputs.files import error_codes, fill, tar_bytes

ROOTS = ("folder", "folder", "some.tar", "some.tar")  # of the pictures of a folder and an archive


@pytest.fixture
def everything(tmp_path: Path) -> InputSpec:
    """One input of each kind, some with errors."""
    fill(tmp_path, "folder/2.png", "folder/10.png", "folder/sub/3.png", "one.data")
    (tmp_path / "some.tar").write_bytes(tar_bytes({"t.png": b"t"})[:1024])
    (tmp_path / "list.txt").write_text(f"{tmp_path}/listed.png\n{tmp_path}/folder\n{tmp_path}/some.tar\n")
    (tmp_path / "m.jsonl").write_text('{"image": "one.data"}\n{"image"\n')
    paths = ("folder", "some.tar", "one.data", "fold*/1*", "none*.png")
    return InputSpec(
        paths=tuple(f"{tmp_path}/{name}" for name in paths),
        lists=(str(tmp_path / "list.txt"),),
        manifests=(str(tmp_path / "m.jsonl"),),
    )


def test_an_address_is_no_missing_file_and_its_password_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("s3://key:secret@bucket/b.png\nhttp://[x/a.png\n")
    spec = InputSpec(paths=("https://me:secret@a.example/a.png?secret=1",), lists=(str(tmp_path / "list.txt"),))
    items = list(read_inputs(spec))
    assert [item.label for item in items] == ["https://a.example/a.png", "s3://bucket/b.png", "http://[x/a.png"]
    assert all(
        item.error and "download it, or use --engine ray of the command line" in item.error.message for item in items
    )
    assert "secret" not in str([(item.label, item.error) for item in items])
    listed = read_inputs(InputSpec(lists=spec.lists), addresses=True)
    assert [item.error for item in listed] == [None, None]  # a worker of the cluster reads them


def test_everything_that_is_named_gives_items_in_the_order_of_naming(everything: InputSpec, tmp_path: Path) -> None:
    check_inputs(everything)
    items = list(read_inputs(everything))
    assert list(read_inputs(everything)) == items
    assert count_inputs(everything) == len(items)
    assert [item.label.removeprefix(f"{tmp_path}/") for item in items] == [
        *("folder/2.png", "folder/10.png", "some.tar/t.png", "some.tar", "one.data", "folder/10.png", "none*.png"),
        *("listed.png", "folder/2.png", "folder/10.png", "some.tar/t.png", "some.tar", "one.data", "m.jsonl:2"),
    ]
    roots = [item.root and os.path.relpath(item.root, tmp_path) for item in items]
    assert roots == [*ROOTS, None, ".", None, None, *ROOTS, ".", "."]
    codes = error_codes(items)
    assert [codes[index] for index in (3, 6, 11, 13)] == ["archive", "missing", "archive", "manifest"]
    assert codes.count(None) == 10


def test_folders_that_a_list_names_are_searched_like_those_of_the_command(
    everything: InputSpec, tmp_path: Path
) -> None:
    labels = [item.label for item in read_inputs(replace(everything, recursive=True))]
    assert labels.count(f"{tmp_path}/folder/sub/3.png") == 2  # named by the command, and in the list


def test_shards_have_every_item_once_and_each_tells_of_names_without_pictures(
    everything: InputSpec, tmp_path: Path
) -> None:
    fill(tmp_path, *(f"folder/more_{number}.png" for number in range(60)))
    Path(os.fsdecode(bytes(tmp_path) + b"/folder/raw\xff.png")).touch()
    (tmp_path / "empty.png").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{name}\n" for name in ("listed", "empty.png", "a.png")))
    places = [f"{tmp_path}/{name}" for name in ("gone", "gone.tar", "gone.png", "loop", "empty.png")]
    spec = replace(everything, paths=(*everything.paths, *places))
    names = {*places, f"{tmp_path}/none*.png", f"{tmp_path}/some.tar"}
    whole, shards = list(read_inputs(spec)), [list(read_inputs(replace(spec, shard=(index, 3)))) for index in range(3)]
    own = [[item.label for item in shard if not item.is_elsewhere] for shard in shards]

    assert sorted(itertools.chain(*own)) == sorted(item.label for item in whole)
    for index, (shard, part) in enumerate(zip(shards, own, strict=True)):
        assert len(part) > 5
        assert {item.label for item in shard if item.is_elsewhere} == names - {*part}
        for label in part:
            assert int(hashlib.sha256(label.encode(errors="surrogatepass")).hexdigest()[:16], 16) % 3 == index


@pytest.mark.parametrize(
    ("label", "shard"),  # the first 8 bytes of the SHA-256, modulo 1000
    [
        ("./folder/../pictures/a.png", 784),  # pictures/a.png
        ("9.41\u202fAM.png", 336),
        ("a\nb.png", 53),
        ("inv\udcff.png", 364),  # stands for a byte that is not UTF-8
        ("half \ud83d.png", 193),  # stands for nothing
        ("s3://bucket/./a.png", 855),
    ],
)
def test_a_picture_stays_in_the_shard_of_its_label(
    label: str, shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.jsonl").write_text(json.dumps({"image": label}))
    (item,) = read_inputs(InputSpec(manifests=("m.jsonl",), shard=(shard, 1000)))

    assert item.label == label


@pytest.mark.parametrize("shard", [(3, 3), (-1, 3), (0, 0), (1, -1)])
def test_a_shard_out_of_range_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="shard must be"):
        InputSpec(shard=shard)


def test_pictures_are_found_one_by_one(everything: InputSpec, tmp_path: Path) -> None:
    items = read_inputs(everything)
    next(items)
    (tmp_path / "list.txt").unlink()
    with pytest.raises(InputsError, match="no such file"):
        list(items)


def test_a_note_has_the_number_and_the_first_place_of_each_kind() -> None:
    one, other = LeftOut(), LeftOut()
    assert not one
    one.add("pictures without text", "b.png")
    one.add("pictures without text", "c.png", number=1_200)
    other.add("pictures without text", "a.png")
    other.add("texts without picture", "a\n.txt")
    one.extend(other)

    assert one.note() == "pictures without text: 1,202 (first: b.png), texts without picture: 1 (first: a\\n.txt)"
