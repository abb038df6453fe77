"""Pictures at addresses: listing, errors, and secrets that must not appear in messages."""

from pathlib import Path

import pytest

from llama_adapter.app.pictures.inputs import InputsError, InputSpec, check_inputs, count_inputs, read_inputs
from llama_adapter.app.pictures.inputs.addresses import (
    check_remote,
    is_remote,
    read_remote,
    remote_inputs,
    shown_address,
)
from llama_adapter.vision.errors import PictureError
from tests.app.pictures.inputs.files import error_codes, fill

pytestmark = pytest.mark.slow  # importing pyarrow takes longer than these tests' work


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two pictures, one of them with an awkward name, and files that are no pictures."""
    return fill(tmp_path / "pic tures", "pic_10.png", "pic_2.JPG", "notes.txt", ".hidden.png", "in #ner/50% é?.png")


def test_the_pictures_of_a_folder_come_in_natural_order_and_can_be_read(folder: Path) -> None:
    flat = list(remote_inputs(folder.as_uri(), recursive=False))
    deep = list(remote_inputs(folder.as_uri() + "/", recursive=True))

    names = [item.label.removeprefix(f"file://{folder}/") for item in deep]
    assert names == ["in #ner/50% é?.png", "pic_2.JPG", "pic_10.png"]
    assert [item.label.rpartition("/")[2] for item in flat] == ["pic_2.JPG", "pic_10.png"]
    assert [read_remote(str(item.source)) for item in deep] == [name.encode() for name in names]
    assert all(item.error is None for item in deep)


def test_storage_of_other_kinds_is_read_through_fsspec() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.png", b"picture")

    (item,) = remote_inputs("memory://bucket", recursive=False)

    assert item.label == "memory://bucket/a.png"
    assert read_remote(str(item.source)) == b"picture"


def test_a_missing_address_is_one_item_and_a_folder_without_pictures_one_with_an_error(tmp_path: Path) -> None:
    address = (tmp_path / "none").as_uri()

    (item,) = remote_inputs(address, recursive=False)

    assert (item.source, item.error) == (address, None)
    assert error_codes(list(remote_inputs(tmp_path.as_uri(), recursive=False))) == ["not_a_file"]


@pytest.mark.parametrize(("name", "code"), [("", "unreadable"), ("pic_10.png", "too_large"), ("none", "missing")])
def test_what_cannot_be_read_is_an_error_of_that_picture(name: str, code: str, folder: Path) -> None:
    with pytest.raises(PictureError) as caught:
        read_remote((folder / name).as_uri(), max_bytes=3)
    assert caught.value.code == code


def test_files_folders_and_addresses_come_in_the_order_in_which_they_are_named(folder: Path) -> None:
    spec = InputSpec(paths=(str(folder / "pic_10.png"), folder.as_uri(), str(folder)))

    check_inputs(spec, addresses=True)

    assert [item.label for item in read_inputs(spec, addresses=True)] == [
        str(folder / "pic_10.png"),
        f"file://{folder}/pic_2.JPG",
        f"file://{folder}/pic_10.png",
        str(folder / "pic_2.JPG"),
        str(folder / "pic_10.png"),
    ]
    assert count_inputs(spec, addresses=True) is None
    assert count_inputs(InputSpec(paths=(str(folder),)), addresses=True) == 2


def test_unknown_storage_and_parts_of_a_job_with_addresses_are_refused_first(folder: Path) -> None:
    with pytest.raises(InputsError, match="nope"):
        check_remote("nope://bucket/pictures")
    with pytest.raises(InputsError, match="--shard"):
        check_inputs(InputSpec(paths=(folder.as_uri(),), shard=(0, 2)), addresses=True)


@pytest.mark.parametrize("host", ["bucket", "[bucket"])
def test_keys_in_an_address_are_not_shown(host: str) -> None:
    assert shown_address(f"s3://key:secret@{host}/a.png?secret_key=other&region=x") == f"s3://{host}/a.png"


def test_a_file_that_is_called_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:").mkdir()
    (tmp_path / "odd:" / "a.png").touch()

    assert not is_remote("odd://a.png")
    assert is_remote("s3://bucket/a.png")
    assert not is_remote("a.png")
