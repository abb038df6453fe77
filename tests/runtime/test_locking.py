"""Locks of outputs and of partial files: one run at a time, and what killed runs leave is removed or taken over."""

import os
from pathlib import Path

import pytest

from llama_adapter.runtime.atomic_write import atomic_write, require_place
from llama_adapter.runtime.locking import OutputLockedError, locked_output
from llama_adapter.runtime.partial import create_partial, partial_folder, remove_leftovers


@pytest.mark.parametrize("name", ["a.pth", "new/folder/a.pth", "folder", "x" * 255, "名" * 85])
def test_a_second_run_with_the_same_output_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with locked_output(tmp_path / name):
        with pytest.raises(OutputLockedError, match="Another run is writing"), locked_output(tmp_path / name):
            pass
        with locked_output(tmp_path / f"{name[:-1]}y"):
            pass
        with pytest.raises(OutputLockedError), locked_output(tmp_path / name):
            pass
    with locked_output(tmp_path / name):
        pass
    assert os.listdir(tmp_path) == ["folder"]


def test_links_lead_to_one_output(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder")
    with locked_output(tmp_path / "link"), pytest.raises(OutputLockedError), locked_output(tmp_path / "folder"):
        pass


def test_a_lock_that_a_killed_run_left_counts_no_more_and_where_none_can_be_made_the_run_tells_why(
    tmp_path: Path,
) -> None:
    (tmp_path / ".a.pth.lock").touch()
    for output in (tmp_path / "a.pth", Path("/dev/null/a.pth")):
        with locked_output(output):
            pass
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_runs_are_removed_and_those_of_others_kept(tmp_path: Path) -> None:
    (tmp_path / ".a.pth.0a1b2c3d.partial").touch()
    (tmp_path / ".bundle.x_y0z1a2.partial" / "vision").mkdir(parents=True)
    for foreign in ("a.partial", ".a.partial", ".a.pth.0a1b2c3d.partial.txt", ".a.pth.0A1B2C3D.partial"):
        (tmp_path / foreign).touch()
    (tmp_path / "victim").mkdir()
    (tmp_path / ".a.00000000.partial").symlink_to("victim")
    with create_partial(tmp_path / "b.pth") as live, partial_folder(tmp_path / "folder") as folder:
        (folder / "kept").touch()
        remove_leftovers.cache_clear()
        remove_leftovers(tmp_path)
        assert (folder / "kept").exists()
        assert Path(live.name).exists()
        Path(live.name).unlink()
    assert sorted(os.listdir(tmp_path)) == [
        ".a.00000000.partial",
        ".a.partial",
        ".a.pth.0A1B2C3D.partial",
        ".a.pth.0a1b2c3d.partial.txt",
        "a.partial",
        "victim",
    ]


def test_names_of_any_length_are_written(tmp_path: Path) -> None:
    with atomic_write(tmp_path / ("名" * 85)) as file:
        file.write(b"whole")
    with partial_folder(tmp_path / ("名" * 85)) as folder:
        assert folder.is_dir()
    assert os.listdir(tmp_path) == ["名" * 85]


def test_a_write_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".a.json.0a1b2c3d.partial").write_text("half")
    with atomic_write(tmp_path / "a.json") as file:
        file.write(b"whole")
    assert os.listdir(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"whole"
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "a.json") as file:
        file.write(b"other" * (1 // 0))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]


def test_a_place_is_tried_before_the_work_as_it_is_written_to(tmp_path: Path) -> None:
    require_place(tmp_path / "new" / "a.json")
    assert [*tmp_path.rglob("*")] == [tmp_path / "new"]
    read, write = os.pipe()
    for place in ("/dev/null", f"/dev/fd/{write}"):
        require_place(place)
    for descriptor in (read, write):
        os.close(descriptor)
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        require_place(tmp_path)
    with pytest.raises(OSError, match=r"a\.json"):
        require_place("/proc/a.json")
