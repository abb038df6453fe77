"""Labelling by one person: what is shown next, what was answered, and the model's proposals for the next pictures.

A thread asks the model about a window of pictures, and two others prepare the next views, so that no key waits for the
model. Imports no Gradio.
"""

import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.learning.labelled.label_table import LabelTable, picture_cell, picture_path
from llama_adapter.app.learning.labelled.order import next_to_label
from llama_adapter.app.learning.labelled.pictures import SAME_NAME
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.views import data_address
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.service import Service
from llama_adapter.app.serving.online.types import ServiceError
from llama_adapter.app.serving.web.html import told
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.files import read_picture_file

WINDOW: Final = 256  # pictures with an answer of the model, among which the next one is chosen
NUM_REMEMBERED: Final = 512  # finished pictures from which the next ones shall differ
VIEW_SIDE: Final = 1024  # pixels
_CLIENT: Final = "label"
_FIRST: Final = 32  # pictures that the model answers before those that earlier runs labelled
_AHEAD: Final = 2  # pictures that are ready to be shown
_NUM_TIMES: Final = 21  # of the last labels, for the rate
_PAUSE_S: Final = 0.5  # before a busy service is asked again


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The model's answer for a picture."""

    probabilities_C: np.ndarray  # float32, of each choice
    features_D: np.ndarray  # float32, close for pictures that look alike; empty if unknown

    @property
    def choice(self) -> int:
        """The likeliest choice."""
        return int(self.probabilities_C.argmax())

    @property
    def probability(self) -> float:
        """Of the likeliest choice."""
        return float(self.probabilities_C.max())


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What the page shows."""

    picture: int | None  # the index of the picture; None: all are labelled or skipped
    name: str
    address: str  # a `data:` address of the picture
    proposal: Proposal | None
    is_waiting: bool  # whether a proposal may still come
    last: str  # what Undo takes back: the label in quotes, or skip; empty: nothing
    num_labelled: int
    num_skipped: int
    num_pictures: int
    per_minute: float | None  # labels
    failed: tuple[tuple[str, str], ...]  # names of pictures that cannot be read, and why
    problem: str  # why there are no proposals; empty: there are


class LabelSession:
    """The state of one page. Thread-safe; several tabs of a browser show the same state. The caller closes it."""

    def __init__(
        self,
        service: Service,
        pictures: Sequence[PictureInput],
        table: LabelTable,
        *,
        question: str,
        choices: tuple[str, ...],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`table` has the labels of earlier runs: pictures in it are not asked again. Pictures are known by their path.

        Raises ValueError for choices that are not at least two different texts.
        """
        self._service, self._table, self._task, self._now = service, table, OneOf(choices), now
        self.question, self.choices = question, choices
        folder = table.path.parent
        unique = {picture_path(picture.label, folder=""): picture for picture in reversed(pictures)}
        self._pictures = list(reversed(unique.values()))
        self._indices = {path: index for index, path in enumerate(reversed(unique))}
        self._cells: dict[int, str] = {}
        self._labels: dict[int, str] = {}
        self._skipped, self._failed = set[int](), dict[int, str]()
        self._history: list[int] = []  # labelled and skipped pictures, the last one at the end
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._proposals: dict[int, Proposal] = {}  # of open pictures
        self._finished: OrderedDict[int, Proposal] = OrderedDict()  # of labelled and skipped pictures
        self._asked = set[int]()
        self._unanswered = set[int]()  # pictures for which the model gave no answer
        self._problem = ""
        self._current: int | None = None
        self._upcoming: deque[int] = deque()
        self._views: dict[int, Future[str]] = {}
        self._viewers = ThreadPoolExecutor(2, thread_name_prefix="views")
        self._changed, self._closing = threading.Condition(), threading.Event()
        repeated = {picture.repeats for picture in pictures}
        for index, picture in enumerate(self._pictures):
            try:
                self._cells[index] = picture_cell(picture.label, folder=folder)
                if picture.label in repeated:
                    raise ValueError(SAME_NAME)
            except ValueError as error:
                self._failed[index] = str(error)
        self._take_rows()
        done = self._labels.keys() | self._failed.keys()
        order = [index for index in range(len(self._pictures)) if index not in done]
        random.Random(0).shuffle(order)  # neighbours in a folder look alike
        self._open = dict.fromkeys(order)  # pictures to label, in the order in which the model is asked
        self._to_ask = deque([*order[:_FIRST], *list(self._labels)[-WINDOW:], *order[_FIRST:]])
        self._most_in_flight = max(1, min(2 * service.batch_size, service.limits.max_waiting_per_client))
        with self._changed:
            self._advance()
        self._thread = threading.Thread(target=self._propose, name="proposals", daemon=True)
        self._thread.start()

    @property
    def table_name(self) -> str:
        """The table, as the user named it."""
        return str(self._table.path)

    def close(self) -> None:
        """End the threads. The table is not closed."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._viewers.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    def choose(self, picture: int, choice: int) -> None:
        """Label a picture, unless another one is shown by now. Raises the errors of `LabelTable.add`."""
        with self._changed:
            if picture == self._current:
                self._table.add(self._cells[picture], self.choices[choice])
                self._labels[picture] = self.choices[choice]
                self._times.append(self._now())
                self._finish(picture)

    def skip(self, picture: int) -> None:
        """Leave a picture without a label, unless another one is shown by now. A later run asks it again."""
        with self._changed:
            if picture == self._current:
                self._skipped.add(picture)
                self._finish(picture)

    def undo(self, picture: int | None) -> None:
        """Show the last finished picture again, without its label, unless another picture than `picture` is shown.

        Raises the errors of `LabelTable.remove_last`.
        """
        with self._changed:
            if picture != self._current or not self._history:
                return
            last = self._history[-1]
            if last in self._labels:
                self._table.remove_last()
                del self._labels[last]
                if self._times:
                    self._times.pop()
            self._skipped.discard(last)
            self._history.pop()
            self._open[last] = None
            if (proposal := self._finished.pop(last, None)) is not None:
                self._proposals[last] = proposal
            elif last not in self._unanswered:
                self._asked.discard(last)
            if self._current is not None:
                self._upcoming.appendleft(self._current)
            self._current = last
            self._prepare()

    def is_waiting(self, picture: object) -> bool:
        """Whether this picture is shown and has no proposal yet, so that the page stays as it is."""
        with self._changed:
            return picture == self._current and self._waits(self._current)

    def shown(self) -> Shown:
        """What to show now. Waits for the view of the picture; pictures that cannot be read are passed over."""
        while True:
            with self._changed:
                index = self._current
                view = None if index is None else self._views.get(index)
            address = ""
            if index is not None and view is not None:  # None while the session is closed
                try:
                    address = view.result()
                except Exception as error:
                    self._fail(index, error.message if isinstance(error, PictureError) else told(error)[0])
                    continue
            with self._changed:
                if index == self._current:
                    return self._shown(index, address)

    # Called with the lock

    def _shown(self, index: int | None, address: str) -> Shown:
        return Shown(
            picture=index,
            name="" if index is None else self._name(index),
            address=address,
            proposal=None if index is None else self._proposals.get(index),
            is_waiting=self._waits(index),
            last=self._last(),
            num_labelled=len(self._labels),
            num_skipped=len(self._skipped),
            num_pictures=len(self._pictures),
            per_minute=per_minute(self._times),
            failed=tuple((self._name(failed), reason) for failed, reason in self._failed.items()),
            problem=self._problem,
        )

    def _last(self) -> str:
        if not self._history:
            return ""
        label = self._labels.get(self._history[-1])
        return "skip" if label is None else f"“{label}”"

    def _waits(self, index: int | None) -> bool:
        is_known = index in self._unanswered or index in self._proposals
        return index is not None and not self._problem and not is_known

    def _name(self, index: int) -> str:
        return self._cells.get(index) or self._pictures[index].label

    def _take_rows(self) -> None:
        """Take over the labels of earlier runs. Undo takes back those at the table's end that are of this run."""
        for row in self._table.rows:
            index = self._indices.get(picture_path(row.picture, folder=self._table.path.parent))
            if index is None or index in self._labels or row.question != self._table.question:
                self._history.clear()
                continue
            self._labels[index] = row.label
            self._history.append(index)

    def _finish(self, index: int) -> None:
        """Remember a picture that is labelled or skipped, and go to the next one."""
        self._history.append(index)
        self._open.pop(index, None)
        if (proposal := self._proposals.pop(index, None)) is not None:
            self._remember(index, proposal)
        self._advance()

    def _remember(self, index: int, proposal: Proposal) -> None:
        self._finished[index] = proposal
        while len(self._finished) > NUM_REMEMBERED:
            self._finished.popitem(last=False)

    def _advance(self) -> None:
        """Go to the next picture."""
        self._current = None
        self._prepare()
        self._current = self._upcoming.popleft() if self._upcoming else None
        self._prepare()

    def _prepare(self) -> None:
        """Choose the pictures that are shown next, start their views, and wake the thread that asks the model."""
        while len(self._upcoming) < _AHEAD and (index := self._next()) is not None:
            self._upcoming.append(index)
        wanted = {self._current, *self._upcoming, *self._history[-1:]} - {None}
        self._views = {index: view for index, view in self._views.items() if index in wanted}
        for index in wanted - self._views.keys():
            assert index is not None
            if index in self._open and not self._closing.is_set():
                self._views[index] = self._viewers.submit(self._view, index)
        self._changed.notify_all()

    def _next(self) -> int | None:
        """The picture to show after the upcoming ones: by its proposal, or any one as long as there are none."""
        ahead = {self._current, *self._upcoming}
        candidates = [index for index in self._proposals if index not in ahead]
        if not candidates:
            return next((index for index in self._open if index not in ahead), None)
        open_ones = [self._proposals[index] for index in candidates]
        known = [one for index, one in self._finished.items() if index in self._labels]
        known += [self._proposals[index] for index in self._upcoming if index in self._proposals]
        features = _filled([one.features_D for one in (*open_ones, *known)])
        probabilities = np.stack([one.probabilities_C for one in open_ones])
        best = next_to_label(probabilities, features[: len(candidates)], features[len(candidates) :])
        return candidates[best]

    def _next_to_ask(self) -> int | None:
        """A picture that the model has not answered: those shown next, then others as far as the window goes."""
        for index in (self._current, *self._upcoming):
            if index is not None and index not in self._asked:
                return index
        while self._to_ask and (
            self._to_ask[0] in self._asked or self._to_ask[0] in self._skipped | self._failed.keys()
        ):
            self._to_ask.popleft()
        if not self._to_ask:
            return None
        is_full = len(self._asked & self._open.keys()) >= WINDOW and self._to_ask[0] in self._open
        return None if is_full else self._to_ask[0]

    # Called without the lock

    def _fail(self, index: int, reason: str) -> None:
        """Pass over a picture that cannot be read."""
        with self._changed:
            if index not in self._open:
                return
            self._failed[index] = reason
            del self._open[index]
            self._proposals.pop(index, None)
            with suppress(ValueError):
                self._upcoming.remove(index)
            if index == self._current:
                self._advance()
            else:
                self._prepare()

    def _read(self, index: int) -> bytes:
        """The bytes of a picture's file. Raises PictureError."""
        return bytes_of(self._pictures[index], max_bytes=self._service.limits.max_picture_bytes)

    def _view(self, index: int) -> str:
        """A picture as a `data:` address. Raises PictureError if it cannot be read."""
        data, name = self._read(index), self._name(index)
        while True:
            try:
                reading = self._service.view(data, name=name, side=VIEW_SIDE, client=_CLIENT).result()
                break
            except ServiceError as error:
                if error.retry_after_s is None or self._closing.wait(min(error.retry_after_s, _PAUSE_S)):
                    raise
        if reading.pixels is None:
            assert reading.error is not None, "a reading has pixels or an error"
            raise PictureError(reading.error.code, reading.error.message)  # type: ignore[arg-type]  # a reader's code
        return data_address(Image.fromarray(reading.pixels))

    def _propose(self) -> None:
        """Ask the model about pictures until the session is closed."""
        in_flight: deque[tuple[int, RequestHandle]] = deque()
        while not self._closing.is_set():
            with self._changed:
                index = self._next_to_ask() if len(in_flight) < self._most_in_flight else None
                if index is None and not in_flight:
                    self._changed.wait()
                    continue
                if index is not None:
                    self._asked.add(index)
            if index is None:
                self._note(*in_flight.popleft())
                continue
            try:
                in_flight.append((index, self._ask(index)))
            except PictureError as error:
                self._fail(index, error.message)
            except ServiceError as error:
                with self._changed:
                    self._asked.discard(index)
                if in_flight:
                    self._note(*in_flight.popleft())
                elif self._closing.wait(min(error.retry_after_s or _PAUSE_S, _PAUSE_S)):
                    break
            except Exception as error:  # the question is too long, for example: it is so for every picture
                with self._changed:
                    self._problem = told(error)[0]
                break
        for _, handle in in_flight:
            handle.cancel()

    def _ask(self, index: int) -> RequestHandle:
        return self._service.submit(
            Ask(
                picture=self._read(index),
                prompt=self.question,
                label=self._name(index),
                task=self._task,
                client=_CLIENT,
                with_pieces=False,
            )
        )

    def _note(self, index: int, handle: RequestHandle) -> None:
        """Wait for an answer, and keep it."""
        answer = handle.result()
        probabilities = np.array([(answer.choice or {}).get(choice, np.nan) for choice in self.choices], np.float32)
        if answer.error is not None or not np.isfinite(probabilities).all():
            with self._changed:  # if the picture cannot be read, its view says why
                self._unanswered.add(index)
            return
        features = self._service.visual_features(answer.digest)
        features = np.empty(0, np.float32) if features is None else features
        proposal = Proposal(probabilities_C=probabilities, features_D=features)
        with self._changed:
            if index in self._open:
                self._proposals[index] = proposal
            else:
                self._remember(index, proposal)
            self._prepare()


def bytes_of(picture: PictureInput, *, max_bytes: int) -> bytes:
    """The bytes of a picture's file. Raises PictureError."""
    if picture.error is not None:
        raise PictureError(picture.error.code, picture.error.message)  # type: ignore[arg-type]  # a code of inputs
    if isinstance(picture.source, bytes):
        return picture.source
    if isinstance(picture.source, FileSlice):
        return picture.source.read(max_bytes=max_bytes)
    if not isinstance(picture.source, str):
        raise PictureError("unsupported", f"`{shown_name(picture.label)}` is an encoded picture, which cannot be shown")
    return read_picture_file(picture.source, max_bytes=max_bytes)


def _filled(features: Sequence[np.ndarray]) -> np.ndarray:
    """The features of pictures (B, D). Empty ones are replaced by the mean, which is no reason to prefer a picture."""
    width = max(map(len, features))
    known = [one for one in features if len(one) == width]
    mean_D = np.mean(known, axis=0)
    return np.stack([one if len(one) == width else mean_D for one in features])


def per_minute(times: Sequence[float]) -> float | None:
    """Labels per minute between the first and the last of these times in seconds; None for fewer than two."""
    seconds = times[-1] - times[0] if len(times) > 1 else 0.0
    return 60 * (len(times) - 1) / seconds if seconds > 0 else None
