"""Files, folders and zips on the Batch tab become one list of pictures, with notes about skipped files."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from llama_adapter.app.serving.online.service import ServiceLimits
from llama_adapter.app.serving.web.batch_files import MAX_PICTURES, BatchFiles
from llama_adapter.app.serving.web.uploads import Upload, private_uploads
from llama_adapter.vision.errors import PictureError

LIMITS = ServiceLimits(max_picture_bytes=1_000)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The upload folder."""
    with private_uploads() as folder:
        yield folder


def files_of(uploads: Sequence[Upload], *, max_pictures: int = MAX_PICTURES) -> closing[BatchFiles]:
    return closing(BatchFiles(uploads, limits=LIMITS, max_pictures=max_pictures))


def upload(folder: Path, name: str, data: bytes = b"x", *, shown: str = "") -> Upload:
    path = folder / name
    path.write_bytes(data)
    return Upload(path=str(path), name=shown or name)


def zipped(folder: Path, name: str, names: list[str]) -> Upload:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for number, entry in enumerate(names):
            archive.writestr(entry, str(number))
    return Upload(path=str(folder / name), name=name)


def code_of(files: BatchFiles, number: int = 0) -> str:
    with pytest.raises(PictureError) as caught:
        files.pictures[number].read()
    return caught.value.code


def test_files_and_the_pictures_of_zips_come_in_their_order_under_unique_names(folder: Path) -> None:
    uploads = [upload(folder, "a.png"), zipped(folder, "more.ZIP", ["a.png", "cats/b.jpg"]), upload(folder, "notes")]

    with files_of(uploads) as files:
        assert [file.name for file in files.pictures] == ["a.png", "a (2).png", "cats/b.jpg", "notes"]
        assert [file.read() for file in files.pictures] == [b"x", b"0", b"1", b"x"]


def test_of_a_folder_only_pictures_count(folder: Path) -> None:
    names = ["a.png", "b.txt", ".hidden.png", "c.webp", "d.heic", "@eaDir/a.png/T.jpg"]

    with files_of([upload(folder, name.replace("/", "_"), shown=f".folder/{name}") for name in names]) as files:
        assert [file.name for file in files.pictures] == [".folder/a.png", ".folder/c.webp", ".folder/d.heic"]
        assert files.notes == ["Folder: skipped 1 file that is not a picture, 1 hidden file, 1 thumbnail."]


def test_a_file_is_read_only_when_its_turn_comes_and_only_up_to_the_limit(folder: Path) -> None:
    gone, large = upload(folder, "gone.png"), upload(folder, "large.png", bytes(1_001))
    with files_of([gone, large]) as files:
        Path(gone.path).unlink()
        assert (code_of(files, 0), code_of(files, 1)) == ("missing", "too_large")


@pytest.mark.parametrize("name", ["picture.png", "archive.zip"])
def test_no_file_outside_of_the_uploads_is_opened(folder: Path, tmp_path: Path, name: str) -> None:
    foreign = upload(tmp_path, name)
    linked = folder / f"linked-{name}"
    linked.symlink_to(tmp_path / name)

    with files_of([foreign, Upload(path=str(linked), name=name)]) as files:
        assert (code_of(files, 0), code_of(files, 1)) == ("missing", "missing")


def test_a_zip_that_cannot_be_opened_stays_in_the_list_with_its_reason(folder: Path) -> None:
    with files_of([upload(folder, "broken.zip"), upload(folder, "a.png")]) as files:
        assert [file.name for file in files.pictures] == ["broken.zip", "a.png"]
        assert code_of(files) == "truncated"


def test_a_zip_without_pictures_gets_a_note(folder: Path) -> None:
    with files_of([zipped(folder, "texts.zip", ["a.txt"])]) as files:
        assert files.pictures == []
        assert files.notes == ["texts.zip: skipped 1 file that is not a picture.", "texts.zip: no pictures in it."]


def test_more_pictures_than_one_batch_takes_are_left_out(folder: Path) -> None:
    uploads = [upload(folder, f"{number}.png") for number in range(4)]

    with files_of(uploads, max_pictures=3) as files:
        assert len(files.pictures) == 3
        assert files.notes == ["One batch takes 3 pictures; 1 more were left out."]


def test_names_are_those_of_the_browser_made_printable_and_relative(folder: Path) -> None:
    uploads = [
        upload(folder, "a", shown="../../etc/x\x1b.png"),
        upload(folder, "b", shown="C:\\pictures\\été.png"),
    ]
    with files_of(uploads) as files:
        assert [file.name for file in files.pictures] == ["etc/x\\x1b.png", "pictures/été.png"]
