"""Asking from the page: an answer that grows, and everything that may go wrong, as states that a page can show."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.online.service import Service, ServiceLimits
from llama_adapter.app.web.chat_run import ask
from llama_adapter.app.web.chat_state import PickedPicture, Turn
from llama_adapter.app.web.looking import file_of, files_of, look
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.uploads import place_in_uploads, private_uploads, uploaded
from llama_adapter.app.web.yes_no_run import judge
from llama_adapter.app.web.yes_no_state import Judged
from llama_adapter.llm.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

MOON = sample_pictures() / "01-yellow-moon-green-cross.png"
CAPTION = "a small yellow moon above a small green cross"


@pytest.fixture(scope="module")
def uploads() -> Iterator[Path]:
    with private_uploads() as folder:
        yield folder


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service(Captioner.load)
    service.start()
    service.wait_until_ready(60)
    yield service
    service.close()


def picture(path: str) -> PickedPicture:
    return PickedPicture(source=path, shown=path, name=Path(path).name)


def states(
    service: Service, path: str, *, question: str = "Generate caption of this image", stop_first: bool = False
) -> list[Turn]:
    async def collect() -> list[Turn]:
        runs = Runs()
        with runs.open("page", "chat") as run:
            if stop_first:
                run.stop()
            turns = ask(
                service,
                run,
                picture=picture(path),
                question=question,
                sampling=SamplingParams(),
                client="page",
            )
            return [turn async for turn in turns]

    return asyncio.run(collect())


def test_an_answer_begins_empty_grows_and_ends(service: Service, uploads: Path) -> None:
    turns = states(service, place_in_uploads(MOON))

    assert turns[0].is_open
    assert turns[0].text == ""
    assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(turns))
    assert turns[-1].answer is not None
    assert turns[-1].text == turns[-1].answer.text == CAPTION
    assert [turn.is_open for turn in turns] == [True] * (len(turns) - 1) + [False]


def test_a_stopped_question_ends_as_such(service: Service, uploads: Path) -> None:
    last = states(service, place_in_uploads(MOON), stop_first=True)[-1]

    assert last.answer is not None
    assert last.answer.error is not None
    assert last.answer.error.code == "cancelled"


@pytest.mark.parametrize("path", ["/etc/passwd", "/nowhere", "", "a\0b"])
def test_a_picture_from_elsewhere_is_a_problem_and_not_read(service: Service, uploads: Path, path: str) -> None:
    last = states(service, path)[-1]

    assert last.problem is not None
    assert "no longer on the server" in last.problem.sentence


def test_a_question_that_is_too_long_is_a_problem_in_a_sentence(service: Service, uploads: Path) -> None:
    last = states(service, place_in_uploads(MOON), question="word " * 2000)[-1]

    assert last.problem is not None
    assert last.problem.sentence
    assert last.problem.http_status == 400


def test_a_service_that_is_not_there_is_a_problem_in_a_sentence(uploads: Path) -> None:
    last = states(Service(Captioner.load), place_in_uploads(MOON))[-1]

    assert last.problem is not None
    assert last.problem.sentence == "The model is being loaded."


def judged(
    service: Service, files: list[tuple[str, str]], *, stop_after: int | None = None
) -> list[tuple[Judged, ...]]:
    async def collect() -> list[tuple[Judged, ...]]:
        runs = Runs()
        seen = []
        with runs.open("page", "yes-no") as run:
            states = judge(
                service, run, files=files, question="Is there a red star?", choices=("yes", "no"), client="page"
            )
            async for state in states:
                seen.append(state)
                if len(seen) == stop_after:
                    run.stop()
        return seen

    return asyncio.run(collect())


def test_many_pictures_are_judged_in_their_order(service: Service, uploads: Path) -> None:
    names = ["12-red-star.jpg", "24-red-ring.jpg"] * 10
    files = [(place_in_uploads(sample_pictures() / name), name) for name in names]
    last = judged(service, files)[-1]

    assert [one.name for one in last] == names
    assert [max(one.choice, key=one.choice.__getitem__) for one in last if one.choice] == ["yes", "no"] * 10
    assert all(one.thumbnail for one in last)


def test_one_bad_picture_does_not_keep_the_others(service: Service, uploads: Path) -> None:
    good = place_in_uploads(sample_pictures() / "12-red-star.jpg")
    last = judged(service, [(good, "good"), ("/etc/passwd", "bad"), (good, "good")])[-1]

    assert [one.choice is not None for one in last] == [True, False, True]
    assert last[1].problem == "The picture is no longer on the server; choose it again."


def test_stopping_leaves_nothing_open(service: Service, uploads: Path) -> None:
    good = place_in_uploads(MOON)
    last = judged(service, [(good, str(number)) for number in range(60)], stop_after=1)[-1]

    assert not any(one.is_open for one in last)
    assert any(one.problem for one in last)


def test_a_busy_service_is_waited_for(uploads: Path) -> None:
    limits = ServiceLimits(max_waiting=2, max_waiting_per_client=2)
    service = Service(Captioner.load, limits=limits)
    service.start()
    try:
        service.wait_until_ready(60)
        good = place_in_uploads(MOON)
        last = judged(service, [(good, str(number)) for number in range(5)])[-1]
    finally:
        service.close()

    assert all(one.choice is not None for one in last)


def test_a_value_is_a_file_only_where_it_was_uploaded(uploads: Path) -> None:
    path = place_in_uploads(MOON)

    assert file_of({"path": path, "orig_name": "C:\\pictures\\my moon.png"}) == (path, "my moon.png")
    assert file_of({"path": path}) == (path, MOON.name)
    for value in (None, "text", 3, [], {}, {"path": 3}, {"path": "/etc/passwd"}, {"path": str(uploads)}, {"url": path}):
        assert file_of(value) is None
    assert files_of([{"path": path}, {"path": "/etc/passwd"}, None]) == [(path, MOON.name)]
    assert files_of({"path": path}) == []


def test_only_files_below_the_upload_folder_count_as_uploaded(uploads: Path) -> None:
    link = uploads / "link.png"
    link.symlink_to("/etc/passwd")
    try:
        assert uploaded(str(link)) is None
    finally:
        link.unlink()
    assert uploaded(str(uploads) + "-beside/a.png") is None
    assert uploaded(place_in_uploads(MOON)) is not None


def test_a_look_at_a_picture_tells_what_it_is_or_why_not(service: Service, uploads: Path, tmp_path: Path) -> None:
    def look_at(path: str, name: str) -> PickedPicture:
        return asyncio.run(look(service, (path, name), client="test"))

    seen = look_at(place_in_uploads(MOON), "moon.png")
    assert (seen.name, seen.width, seen.height, seen.problem) == ("moon.png", 224, 224, "")
    assert seen.shown == seen.source

    deep = tmp_path / "deep.tiff"
    Image.new("I;16", (300, 200)).save(deep)
    seen = look_at(place_in_uploads(deep), "deep.tiff")
    assert (seen.width, seen.height) == (300, 200)
    with Image.open(seen.shown) as preview:
        assert (preview.format, preview.size) == ("WEBP", (300, 200))

    broken = tmp_path / "broken.png"
    broken.write_bytes(MOON.read_bytes()[:700])
    assert "`my.png` is cut off" in look_at(place_in_uploads(broken), "my.png").problem
    assert "choose it again" in look_at(str(tmp_path / "none.png"), "none.png").problem


def test_uploads_lie_in_a_folder_of_their_own_that_is_removed(uploads: Path) -> None:
    with private_uploads() as folder:
        assert folder != uploads
        assert folder.parent.stat().st_mode & 0o077 == 0
        assert Path(place_in_uploads(MOON)).is_relative_to(folder)

    assert not folder.exists()
    assert Path(place_in_uploads(MOON)).is_relative_to(uploads)
