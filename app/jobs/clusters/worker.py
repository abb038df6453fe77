"""A captioner that answers chunks, on the machine of its device. Ray makes an actor of it; it imports no Ray."""

import dataclasses
import pickle
import socket
import time
from dataclasses import dataclass

from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.jobs.clusters.chunks import AnsweredChunk, Chunk
from llama_adapter.app.jobs.clusters.reading import enter_folder
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.runner import check_questions, warm_up
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.runtime.problems import Problem, describe
from llama_adapter.vision.pixels import PixelRule


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A captioner's report to the driver after it was loaded."""

    host: str
    spec: CaptionerSpec  # no value is "auto"
    info: ModelInfo
    pixels: PixelRule  # of the pictures that the model takes


@dataclass(frozen=True, kw_only=True, slots=True)
class NotLoaded:
    """A captioner's report to the driver that it could not be loaded."""

    host: str
    problem: Problem


class CaptionWorker:
    """Loads the captioner of a job on the first call, and answers with it."""

    def __init__(self, job: Job, *, device: str, threads: int | None, folder: str) -> None:
        """`folder` is the current folder of the driver."""
        self._job, self._device, self._threads = job, device, threads
        self._captioner: Captioner | None = None
        enter_folder(folder)

    def load(self) -> LoadedModel | NotLoaded:
        """Load the model, once. Errors are returned, not raised, so that Ray does not wrap their message."""
        host = socket.gethostname()
        try:
            captioner = self._loaded()
        except Exception as error:
            return NotLoaded(host=host, problem=describe(error))
        return LoadedModel(host=host, spec=captioner.spec, info=captioner.info, pixels=captioner.pixels)

    def answer(self, read: bytes) -> AnsweredChunk:
        """Answer a read and pickled `Chunk`."""
        started = time.perf_counter()
        chunk: Chunk = pickle.loads(read)
        digests, asked = [], []
        for item in chunk.items:
            assert isinstance(item.picture, PictureReading), "the pictures of a read chunk were read"
            digests.append(item.picture.digest)
            if not item.picture.is_only_digest:
                asked.append(item)
        answers: list[Answer] = []
        problem = chunk.problem
        try:
            if problem is None and asked:
                events = self._loaded().run(asked, sampling=self._job.sampling, logprobs=self._job.logprobs)
                answers = [event for event in events if isinstance(event, Answer)]
        except Exception as error:
            problem = describe(error)
        return AnsweredChunk(
            digests=tuple(digests),
            answers=tuple(answers),
            host=socket.gethostname(),
            busy_s=time.perf_counter() - started,
            problem=problem,
        )

    def _loaded(self) -> Captioner:
        if self._captioner is None:
            if self._threads is not None:
                from llama_adapter.app.models.parallel.cores import compute_with  # imports torch

                self._cores = compute_with(self._threads, ranks=self._job.spec.tensor_parallel)
            captioner = Captioner.from_spec(dataclasses.replace(self._job.spec, device=self._device))
            check_questions(self._job, captioner)
            warm_up(self._job, captioner)
            self._captioner = captioner
        return self._captioner
