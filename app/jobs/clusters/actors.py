"""The captioner actors of a job: which are ready, and which chunks each of them has. Runs in the driver."""

import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_adapter.app.jobs.clusters.chunks import AnsweredChunk, Chunk
from llama_adapter.app.jobs.clusters.cluster import WorkersFailedError
from llama_adapter.app.jobs.clusters.places import Place
from llama_adapter.app.jobs.clusters.worker import CaptionWorker, LoadedModel, NotLoaded
from llama_adapter.app.jobs.job import Job
from llama_adapter.runtime.child_process import last_line

if TYPE_CHECKING:
    from ray import ObjectRef

IN_HAND = 2  # chunks per captioner: one being answered, and one being transferred
MAX_RESTARTS = 5  # restarts of a captioner that answers nothing in between; then it is given up

_log = logging.getLogger("llama_adapter.scale")


@dataclass(eq=False, slots=True)
class _Member:
    place: Place
    actor: Any  # its methods are those of CaptionWorker, with `remote`
    is_ready: bool = False
    num_answered: int = 0  # by this actor
    in_hand: "dict[ObjectRef[AnsweredChunk], Chunk]" = field(default_factory=dict)  # the first one is being answered


class LostChunk(NamedTuple):
    """A chunk that a captioner did not answer, because its process or machine was lost."""

    chunk: Chunk
    may_be_cause: bool  # False if it waited for another chunk


@dataclass(slots=True)
class Crew:
    """Hands read chunks to captioners.

    Ray restarts a captioner whose process ends. A captioner is given up if its machine is gone, or if its process ends
    repeatedly.
    """

    job: Job
    places: Sequence[Place]
    folder: str
    say: Callable[[str], object]  # for notes to the user
    _members: list[_Member] = field(default_factory=list)
    _loading: "dict[ObjectRef[Any], _Member]" = field(default_factory=dict)

    def start(self) -> None:
        """Start all captioners; they load in the background."""
        for place in self.places:
            member = _Member(place, self._started(place))
            self._members.append(member)
            self._load(member)

    @property
    def num_ready(self) -> int:
        """Number of captioners that accept chunks."""
        return sum(member.is_ready for member in self._members)

    @property
    def num_in_hand(self) -> int:
        """Number of chunks that captioners have."""
        return sum(len(member.in_hand) for member in self._members)

    @property
    def can_take(self) -> bool:
        """Whether a captioner can accept another chunk."""
        return any(member.is_ready and len(member.in_hand) < IN_HAND for member in self._members)

    def give(self, chunk: Chunk, read: "ObjectRef[bytes]") -> None:
        """Hand a chunk, which was read, to the captioner with the fewest chunks."""
        member = min((member for member in self._members if member.is_ready), key=lambda member: len(member.in_hand))
        member.in_hand[member.actor.answer.remote(read)] = chunk

    def wait(self, timeout_s: float) -> Iterator[tuple[Chunk, AnsweredChunk] | LostChunk | LoadedModel | NotLoaded]:
        """Yield answers, losses and states of captioners, within `timeout_s`.

        Raises WorkersFailedError if no captioner is left.
        """
        import ray

        waiting = [*(reference for member in self._members for reference in member.in_hand), *self._loading]
        done: list[ObjectRef[Any]]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
        if not done and waiting:
            done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        for reference in done:
            if reference not in self._loading:
                yield from self._take_answer(reference)
            elif (state := self._take_state(reference)) is not None:
                yield state

    def stop(self) -> None:
        """Kill the captioners."""
        import ray

        for member in self._members:
            ray.kill(member.actor)
        self._members.clear()

    def _started(self, place: Place) -> Any:
        import ray

        options: dict[str, Any] = {
            "num_cpus": place.num_cpus,
            "num_gpus": place.devices.get("GPU", 0),
            "resources": {name: number for name, number in place.devices.items() if name != "GPU"},
            "label_selector": {"ray.io/node-id": place.machine},
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": 0,  # lost chunks are handled here
        }
        actor = ray.remote(CaptionWorker).options(**options)
        return actor.remote(self.job, device=place.device, threads=place.threads, folder=self.folder)

    def _load(self, member: _Member) -> None:
        # Ray retries it after each restart, so it fails only after the last one.
        self._loading[member.actor.load.options(max_task_retries=-1).remote()] = member

    def _take_state(self, reference: "ObjectRef[Any]") -> LoadedModel | NotLoaded | None:
        import ray

        member = self._loading.pop(reference)
        try:
            state: LoadedModel | NotLoaded = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._replace(member, error)
            return None
        member.is_ready = isinstance(state, LoadedModel)
        return state

    def _take_answer(self, reference: "ObjectRef[Any]") -> Iterator[tuple[Chunk, AnsweredChunk] | LostChunk]:
        import ray

        member = next((member for member in self._members if reference in member.in_hand), None)
        if member is None:  # lost with another chunk of its captioner
            return
        try:
            answered: AnsweredChunk = ray.get(reference)
        except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
            _log.info("a captioner is lost: %s", error)
            lost, member.in_hand, member.is_ready = [*member.in_hand.values()], {}, False
            self._load(member)
            yield from (LostChunk(chunk, may_be_cause=place == 0) for place, chunk in enumerate(lost))
        except ray.exceptions.RayError as error:  # the chunk's pixels were lost with a machine
            _log.info("a chunk is lost: %s", error)
            yield LostChunk(member.in_hand.pop(reference), may_be_cause=True)
        else:
            member.num_answered += 1
            yield member.in_hand.pop(reference), answered

    def _replace(self, member: _Member, error: BaseException) -> None:
        """Replace an actor that has no restarts left by a new one, if it had answered something.

        Raises WorkersFailedError if it was the last captioner and is not replaced.
        """
        import ray

        is_machine = isinstance(error, ray.exceptions.ActorUnschedulableError)
        if member.num_answered and not is_machine:
            member.actor, member.num_answered = self._started(member.place), 0
            self._load(member)
            return
        num_others = self.num_ready + len(self._loading)
        if not num_others:
            raise WorkersFailedError(
                "No process that answers is left: they ended again and again, or their machines went away. "
                f"The last one: {textwrap.shorten(last_line(str(error)), 160)}",
                hint="the memory may be too small for the model or --batch-size; run again, and with --out it goes on "
                "from here",
            ) from error
        what = "the machine of a captioner is gone" if is_machine else "a captioner ended again and again"
        self.say(f"note: {what}; {num_others} of {len(self._members)} go on")
