"""A service whose model sees pictures as tokens answers each request as a captioner that has seen nothing else."""

import io
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import llama_adapter.app.serving.online.service
from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.app.serving.online.service import Ask, Service, ServiceLimits
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.picture_models import pictures, save
from tests.app.serving.online.waiting import WAIT_S

SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=6)
QUESTION = "What is it?"
NUM_PICTURES, NUM_REQUESTS, NUM_THREADS = 24, 240, 6


class Here(PictureReader):
    """Reads in the calling thread: processes would take longer to start than these tests take."""

    def __init__(self, spec: Any, *, pixels: Any, limits: Any, **_: object) -> None:
        super().__init__(spec, pixels=pixels, limits=limits)

    def start(self) -> None:
        pass

    wait_until_ready = start

    def read(self, source: Any, *, keep_waiting: Any = None, **options: Any) -> Any:
        return super().read(source, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("smolvlm"), "smolvlm")


@pytest.fixture
def open_service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    monkeypatch.setattr(llama_adapter.app.serving.online.service, "IsolatedReader", Here)
    opened: list[Service] = []

    def start(**limits: Any) -> Service:
        def load() -> Captioner:
            return Captioner.load(folder, batch_size=4, device="cpu", dtype="float32")

        service = Service(load, limits=ServiceLimits(**limits))
        opened.append(service)
        service.start()
        service.wait_until_ready(WAIT_S)
        return service

    yield start
    for service in opened:
        service.close()


def content(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "png")
    return written.getvalue()


def test_each_answer_is_as_from_an_empty_cache(folder: Path, open_service: Callable[..., Service]) -> None:
    files = [content(image) for image in pictures(NUM_PICTURES)]
    kinds = [*((file,) for file in files), (), (files[0], files[1]), (files[1], files[0])]
    expected = []
    for kind in kinds:
        with Captioner.load(folder, batch_size=1, device="cpu", dtype="float32") as fresh:
            options = {"max_new_tokens": 6}
            one = fresh.ask(kind, QUESTION, **options) if kind else fresh.generate_text(QUESTION, **options)[0]
            expected.append(one.token_ids)
    assert len(set(expected)) > NUM_PICTURES - 3
    # A small cache of encoded pictures, so that some are encoded again.
    service = open_service(encoded_bytes=200_000, max_waiting=10_000, max_waiting_per_client=10_000)
    found: dict[int, Answer] = {}
    order = [random.Random(0).randrange(len(kinds)) for _ in range(NUM_REQUESTS)]

    def work(number: int) -> None:
        handles = []
        for index in range(number, NUM_REQUESTS, NUM_THREADS):
            first, *others = kinds[order[index]] or (None,)
            ask = Ask(
                picture=first,
                others=tuple(filter(None, others)),
                prompt=QUESTION,
                sampling=SAMPLING,
                client=str(number),
            )
            handles.append((index, service.submit(ask)))
        found.update({index: handle.result() for index, handle in handles})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [index for index in range(NUM_REQUESTS) if found[index].token_ids != expected[order[index]]]
    assert not wrong, f"{len(wrong)} answers are others', such as {found[wrong[0]]}"
    assert any(answer.is_reused for answer in found.values())
