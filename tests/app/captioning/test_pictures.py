"""Pictures may be given in every form that is usual in Python; anything else is a TypeError."""

import base64
import io
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from llama_adapter import Answer, Captioner, pipeline
from llama_adapter.app.captioning.pictures import given_pictures
from llama_adapter.app.pictures.inputs import fetching
from llama_adapter.app.pictures.inputs.fetching import Network
from tests.app.golden import GOLDEN, model_options

PICTURE = GOLDEN / "images" / "shapes_200x300.jpg"
PREPROCESSED = np.asarray(Image.open(GOLDEN / "preprocessed" / "shapes_200x300.png").convert("RGB"))


@pytest.fixture(scope="module")
def expected(captioner: Captioner) -> tuple[int, ...]:
    answer = captioner.caption(PICTURE, max_new_tokens=8)
    assert answer.error is None
    return answer.token_ids


class ShortReads(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 0, 1000))


class Unseekable(io.BytesIO):
    """A file such as an answer over HTTP, or of a library that has errors of its own."""

    error: Exception = io.UnsupportedOperation("seek")

    def seek(self, *_: Any) -> int:
        raise self.error


class Stuck(Unseekable):
    error = ValueError("I only go forward")


class OnlyRead:
    """A file with `read`, and an attribute that is no file."""

    buffer = None

    def __init__(self, content: bytes) -> None:
        self.read = io.BytesIO(content).read


def percent_encoded() -> str:
    return f"DATA:;base64,{base64.urlsafe_b64encode(PICTURE.read_bytes()).decode().rstrip('=').replace('A', '%41')}"


def temporary() -> Any:
    file = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  # the test closes it
    file.buffer.write(PICTURE.read_bytes())
    return file


def begun(file: io.BufferedReader) -> io.BufferedReader:
    file.read(2048)
    return file


FORMS: dict[str, Callable[[], object]] = {
    "text": lambda: str(PICTURE),
    "paths of a table": lambda: np.array([str(PICTURE)], object),
    "data URI": lambda: f"data:image/jpeg;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}",
    "data URI, percent-encoded": percent_encoded,
    "path": lambda: PICTURE,
    "bytes": PICTURE.read_bytes,
    "bytearray": lambda: bytearray(PICTURE.read_bytes()),
    "memoryview": lambda: memoryview(PICTURE.read_bytes()),
    "open file": lambda: PICTURE.open("rb"),
    "file open for text": lambda: PICTURE.open(encoding="utf-8"),
    "temporary file open for text": temporary,
    "file in memory": lambda: io.BytesIO(PICTURE.read_bytes()),
    "file with short reads": lambda: ShortReads(PICTURE.read_bytes()),
    "file of which the begin was read": lambda: begun(PICTURE.open("rb")),
    "file that cannot go back": lambda: Unseekable(PICTURE.read_bytes()),
    "file that raises another error instead of going back": lambda: Stuck(PICTURE.read_bytes()),
    "file that can only be read": lambda: OnlyRead(PICTURE.read_bytes()),
    "PIL image": lambda: Image.open(PICTURE),
    "pattern": lambda: str(GOLDEN / "images" / "shapes_200*.jpg"),
    "whole pixels": lambda: np.asarray(Image.open(PICTURE).convert("RGB")),
    "preprocessed uint8": lambda: PREPROCESSED,
    "preprocessed float32": lambda: PREPROCESSED.astype(np.float32),
    "0 to 1": lambda: PREPROCESSED / 255,
    "with a mask of no pixel": lambda: np.ma.masked_array(PREPROCESSED / 255, mask=np.zeros_like(PREPROCESSED)),
    "0 to 1, with a rounding error": lambda: PREPROCESSED / np.float32(255) * np.float32(1.000001) - 1e-7,
    "batch of one": lambda: PREPROCESSED[None],
    "tensor": lambda: torch.tensor(PREPROCESSED),
    "four channels": lambda: np.dstack([PREPROCESSED, np.full((224, 224), 255, np.uint8)]),
    "channels first": lambda: torch.tensor(PREPROCESSED).permute(2, 0, 1) / 255,
    "bfloat16 tensor": lambda: torch.tensor(PREPROCESSED).bfloat16(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_may_be_given_in_any_form(captioner: Captioner, expected: tuple[int, ...], form: str) -> None:
    given = FORMS[form]()
    answer = captioner.caption(given, max_new_tokens=8)  # type: ignore[arg-type]
    if hasattr(given, "close"):
        given.close()

    assert answer.error is None
    assert answer.token_ids == expected


def test_a_batch_of_pixels_is_as_many_pictures(captioner: Captioner, expected: tuple[int, ...]) -> None:
    batch = np.stack([PREPROCESSED, np.zeros_like(PREPROCESSED)]).astype(np.float16)
    first, second = captioner.generate(torch.from_numpy(batch), max_new_tokens=8)

    assert first.token_ids == expected != second.token_ids
    assert [first.picture, second.picture] == ["picture 0", "picture 1"]
    assert captioner.generate(batch[:0]) == []


def test_folders_patterns_and_files_mix_and_prompts_are_paired_with_the_pictures_found(
    captioner: Captioner, tmp_path: Path
) -> None:
    for name in ("a2.png", "a10.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not a picture")
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        archive.add(tmp_path / "a2.png", "inside.png")
    given = [tmp_path, str(tmp_path / "a1*.png"), tmp_path / "missing.png", str(tmp_path / "x*.png")]
    given += [tmp_path / "shard.tar"]
    answers = captioner.generate(given, ["a", "b", "c", "d", "e", "f"], max_new_tokens=1)  # type: ignore[arg-type]

    names = ["a2.png", "a10.png", "a10.png", "missing.png", "x*.png", "inside.png"]
    codes = [None, None, None, "missing", "missing", None]
    assert [Path(answer.picture).name for answer in answers] == names
    assert [answer.prompt for answer in answers] == ["a", "b", "c", "d", "e", "f"]
    assert [answer.error and answer.error.code for answer in answers] == codes


def frames(path: Path) -> Iterator[Any]:
    return ImageSequence.Iterator(Image.open(io.BytesIO(path.read_bytes())))


def closed_files(path: Path) -> Iterator[object]:
    with Image.open(path) as image:
        for number in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(number)
            yield image


def one_buffer(path: Path) -> Iterator[object]:
    buffer = np.zeros((224, 224, 4), np.uint8)
    for frame in frames(path):
        buffer[:] = np.asarray(frame.convert("RGBA"))
        yield buffer


class Film:
    """An iterable that is no iterator, with one image for all steps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[object]:
        yield from closed_files(self._path)


@pytest.mark.parametrize("pictures_of", [frames, closed_files, one_buffer, Film])
@pytest.mark.parametrize("answer", ["generate", "pipeline"])
def test_an_iterator_may_change_or_close_the_picture_that_it_gave(
    captioner: Captioner, tmp_path: Path, pictures_of: Callable[[Path], Any], answer: str
) -> None:
    pictures = [Image.fromarray(PREPROCESSED), Image.new("RGB", (224, 224), "blue")]
    pictures[0].save(tmp_path / "two.png", save_all=True, append_images=pictures[1:])
    expected = [one.text for one in captioner.generate(pictures, max_new_tokens=8)]
    given = pictures_of(tmp_path / "two.png")
    if answer == "generate":
        assert [one.text for one in captioner.generate(given, max_new_tokens=8)] == expected
    else:
        asked = pipeline("caption", captioner)(given, max_new_tokens=8)
        assert [one["caption_text"] for one in asked] == [[text] for text in expected]
    assert expected[0] != expected[1]


GIVEN: dict[str, Callable[[Image.Image], Any]] = {
    "alone": lambda image: image,
    "list": lambda image: [image],
    "iterator": lambda image: iter([image]),
    "values": lambda image: {"a": image}.values(),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_damaged_image_has_the_same_name_however_it_is_given(captioner: Captioner, given: str) -> None:
    error = captioner.caption(GIVEN[given](Image.open(io.BytesIO(PICTURE.read_bytes()[:9000])))).error
    assert error is not None
    assert "`picture 0` is cut off or damaged" in error.message


@pytest.mark.parametrize("given", GIVEN)
def test_threads_may_share_an_image(captioner: Captioner, given: str) -> None:
    large = io.BytesIO()
    Image.effect_noise((1000, 1000), 90).convert("RGB").save(large, "JPEG")
    image = Image.open(large)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: captioner.caption(GIVEN[given](image), max_new_tokens=1), range(8)))
    assert [answer.error for answer in answers] == [None] * 8


def test_a_call_that_waits_leaves_the_stage_of_the_call_that_it_shares_a_clock_with(captioner: Captioner) -> None:
    clock = captioner.profile_clock()
    running = captioner.stream(PICTURE, max_new_tokens=2, clock=clock)
    next(running)
    clock.take()
    waiting = captioner.stream(iter([Image.effect_noise((2000, 2000), 90)]), max_new_tokens=1, clock=clock)
    time.sleep(0.01)
    taken = clock.take()
    assert taken["write"] == sum(taken.values()) >= 0.01
    running.close()
    clock.take()
    answer = list(waiting)[-1]
    assert isinstance(answer, Answer)
    assert clock.seconds["read"] * 1e3 >= answer.ms["read"] > 0


BAD_DATA = {
    "data:image/png;base64,A": "invalid_base64_image",
    "data:image/png;base64,AA*A": "invalid_base64_image",
    "data:image/png;base64,": "empty_image_file",
    "data:": "invalid_image_url",
}


def test_a_bad_data_uri_is_the_error_of_its_own_answer(captioner: Captioner) -> None:
    answers = captioner.generate([*BAD_DATA, PICTURE], max_new_tokens=1)
    assert [answer.error and answer.error.code for answer in answers] == [*BAD_DATA.values(), None]
    assert [answer.picture for answer in answers[:2]] == ["picture 0", "picture 1"]


def test_a_picture_whose_file_was_closed_says_so(captioner: Captioner) -> None:
    with Image.open(PICTURE) as closed, PICTURE.open("rb") as file:
        of_file = Image.open(file)
    for answer in captioner.generate([closed, of_file]):
        assert answer.error is not None
        assert answer.error.code == "unreadable"
        assert "was closed before its pixels were read" in answer.error.message


DENSE = r"A tensor of pixels is dense, got torch\..* on (cpu|meta): call `to_dense"
NO_PICTURES = (5, None, {"a.jpg": 1}, [["a.jpg"]], [b"", 1.5], io.StringIO("text"), object())
WRONG_PIXELS = (
    np.zeros(3),
    np.zeros((2, 2)),
    np.zeros((2, 8, 8)),
    np.zeros((5, 5, 2), np.uint8),
    np.zeros((5, 6, 5)),
    np.zeros((1, 1, 8, 8, 3)),
    np.full((8, 8, 3), -0.1),
    np.full((8, 8, 3), 255.5),
    np.full((8, 8, 3), 1.1),
    np.linspace(-2.1, 2.6, 192).reshape(8, 8, 3),
    np.linspace(-100, 200, 192).reshape(8, 8, 3),
    np.full((8, 8, 3), np.nan),
)


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        *((wrong, TypeError, "picture") for wrong in NO_PICTURES),
        ({"a.jpg": "b.jpg"}, TypeError, "got dict: give several as a list"),
        (None, TypeError, "got NoneType$"),
        ([b"", None], TypeError, "got NoneType at index 1"),
        (torch.zeros(3, 5, 5).to_sparse(), TypeError, DENSE),
        (torch.zeros(3, 5, 5, device="meta"), TypeError, DENSE),
        *((np.zeros((8, 8, 3), dtype), TypeError, "uint8 or a float") for dtype in (np.int64, np.bool_, "U5", object)),
        *((pixels, ValueError, "shape|normalisation") for pixels in WRONG_PIXELS),
        (np.full((8, 8, 3), 1.5), ValueError, "a largest value of at least 2, got 1.5 to 1.5"),
        (
            np.ma.masked_equal(np.eye(8, dtype=np.uint8)[..., None].repeat(3, 2), 1),
            ValueError,
            "masked pixels: fill them with a",
        ),
    ],
)
def test_what_is_no_picture_is_refused(wrong: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        given_pictures(wrong)


def test_one_picture_is_asked_about_at_a_time(captioner: Captioner) -> None:
    answer = captioner.ask(PICTURE, ("Is it red?", "Look at the border."), choices=["yes", "no"])

    assert answer.prompt == "Is it red?\nLook at the border."
    assert set(answer.choice or ()) == {"yes", "no"}
    with pytest.raises(ValueError, match="one picture"):
        captioner.caption(PREPROCESSED[None].repeat(2, axis=0))


@pytest.fixture
def site() -> Iterator[str]:
    """The address of a site with the golden pictures."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(PICTURE.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()
        thread.join()


def test_addresses_are_fetched_from_allowed_hosts_only(
    site: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["https://example.com/a.jpg", "http://", f"{site}/{PICTURE.name}", f"{site}/gone.jpg"]
    with Captioner.load(**model_options(), allowed_hosts=[site]) as captioner:
        private = captioner.generate(addresses, max_new_tokens=8)
        monkeypatch.setattr(fetching, "Network", partial(Network, is_allowed=lambda address: True))
        public = captioner.generate(addresses, max_new_tokens=8)

    def codes(answers: list[Answer]) -> list[str | None]:
        return [answer.error and answer.error.code for answer in answers]

    # The name is allowed, but its address is not on the public internet.
    assert codes(private) == ["image_host_not_allowed", "invalid_image_url", *["image_host_not_allowed"] * 2]
    assert codes(public) == ["image_host_not_allowed", "invalid_image_url", None, "failed_to_download_image"]
    assert public[2].token_ids == expected
    assert public[2].picture == addresses[2]
