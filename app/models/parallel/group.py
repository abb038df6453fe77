"""All ranks, as the first rank manages them: it starts them or joins those of `torchrun`, loads them and ends them."""

import dataclasses
import json
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented, and not in __all__

from llama_adapter import __version__
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.parallel.cores import bind_to, cores_of_ranks
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.fingerprint import files_fingerprint, fingerprints
from llama_adapter.app.models.parallel.launch import Launched, checked_launch
from llama_adapter.app.models.parallel.messages import ReceivedMessages
from llama_adapter.app.models.parallel.rendezvous import (
    FIRST_DEVICE,
    SECONDARY,
    environment_store,
    error_key,
    followed_key,
    join,
    leave,
    require_no_group,
)
from llama_adapter.app.models.parallel.watch import FEW_BEATS, BeatWatch, Failure, StepWatch
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.load import PlacedDecoder
from llama_adapter.llm.parallel.leader import LeadingRunner
from llama_adapter.llm.runners.base import Runner
from llama_adapter.runtime.child_process import ChildProcess
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.devices.base import Collectives
from llama_adapter.runtime.devices.collectives import LIBRARIES
from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.ranks import CollectiveError
from llama_adapter.runtime.schemes.scheme import dtype_name

ENTRY: Final = "llama_adapter.app.models.parallel.rank_process:main"
_POLL_S: Final = 0.05
_END_S: Final = 5.0  # time for a rank to end by itself before it is killed
_NAMING_S: Final = 4.0  # time to find out which rank has failed, after a collective has failed


class RankGroup:
    """All ranks of one model, used by the first rank (`ranks.rank` is 0)."""

    def __init__(self, spec: CaptionerSpec, *, backend: Backend, check: Callable[[], None]) -> None:
        """Start the other ranks, or join those that `torchrun` started. Raises RankError and UsageError.

        `check` is called before ranks are started; it raises if the model could not be used anyway.
        """
        self.size = spec.tensor_parallel
        self._backend = backend
        self._children: dict[int, ChildProcess] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._runner: LeadingRunner | None = None
        self._is_closed, self._has_joined = False, False
        self._step_watch: StepWatch | None = None
        self._restore_cores: Callable[[], None] = lambda: None
        place = checked_launch(spec.tensor_parallel)
        self._place = place or Launched(rank=0, size=self.size, local_rank=0, is_local=True)
        if place is not None and place.rank > 0:
            raise UsageError(
                f"This process is rank {place.rank} of {place.size} of torchrun, and a captioner leads them as rank 0",
                hint="start a command of llama-adapter with torchrun, or Python without it: it starts its own ranks",
            )
        require_no_group()
        try:
            if place is None:
                check()
                self._store, self._seen = self._start_ranks(spec)
            else:
                self._store = environment_store(place, timeout_s=spec.parallel_timeout)
                self._seen = self._store.clone()  # a separate connection: calls on the first one may block
            self._store.set(FIRST_DEVICE, str(backend.device))
            self.ranks, self.channel = self._join(spec)
            self._has_joined = True
        except BaseException:
            self.close()
            raise

    @property
    def share_memory(self) -> bool:
        """Whether all ranks use the memory of this host."""
        return self._place.is_local and self._backend.device.type == "cpu"

    def _start_ranks(self, spec: CaptionerSpec) -> tuple[Any, Any]:
        """Start the other ranks; returns the store through which groups join, and the messages of the ranks.

        Other users have no access to either.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="llama-adapter-ranks-")
        store, messages = str(Path(self._folder.name) / "store"), ReceivedMessages()
        cores = cores_of_ranks(self.size) if self._backend.device.type == "cpu" else [None] * self.size
        given = {"size": self.size, "store": store, "timeout_s": spec.parallel_timeout}
        for rank in range(1, self.size):
            started = {"rank": rank, "cores": cores[rank], **given}
            self._children[rank] = ChildProcess(ENTRY, json.dumps(started), environ={}, watch_parent=True)
            messages.receive(self._children[rank].connection)
        if cores[0] is not None:
            self._restore_cores = bind_to(cores[0])
        return FileStore(store, self.size), messages

    def _join(self, spec: CaptionerSpec) -> Any:
        self._wait_for("hello", self._check_version)
        collectives = self._backend.capabilities.collectives
        self._watch_steps(spec, collectives=collectives)
        try:
            with self._watching():
                timeout_s, device = spec.parallel_timeout, self._backend.device
                return join(self._store, self._place, collectives=collectives, timeout_s=timeout_s, device=device)
        except CollectiveError as error:
            raise self._named_failure(error) from None

    def _check_version(self, rank: int, said: dict[str, Any]) -> None:
        wanted = {"llama-adapter": __version__, "torch": torch.__version__}
        differing = [name for name, version in wanted.items() if said.get(name) != version]
        if differing:
            theirs = ", ".join(f"{name} {said.get(name)}" for name in differing)
            ours = ", ".join(f"{name} {wanted[name]}" for name in differing)
            raise RankError(
                f"Rank {rank} of {self.size} runs {theirs}, and rank 0 runs {ours}",
                hint="install the same versions on all machines",
            )

    def load(self, spec: CaptionerSpec, model: LoadedModel, *, random: object = None) -> None:
        """Tell the other ranks to load their shares of `model`. Does not wait for them.

        Raises OSError, and RankError if a rank has ended.
        """
        wanted = dataclasses.replace(spec, dtype=dtype_name(model.dtype), precision=model.precision, batch_size=1)
        command = {
            "do": "load",
            "spec": dataclasses.asdict(wanted),
            "random": dataclasses.asdict(random) if isinstance(random, RandomLoader) else None,
        }
        try:
            self.channel.send(command)
        except CollectiveError as error:
            raise self._named_failure(error) from None
        self._files = files_fingerprint(model, spec)

    def lead(self, decoder: PlacedDecoder, runner: Runner) -> LeadingRunner:
        """Wait until all ranks have loaded their shares; returns the runner that leads them. Raises RankError."""
        ours = fingerprints(decoder.decoder, files=self._files, past=runner.config.past)

        def check(rank: int, said: dict[str, Any]) -> None:
            differing = [name for name, value in ours.items() if said.get(name) != value]
            if differing:
                raise RankError(
                    f"Rank {rank} of {self.size} has other {' and other '.join(differing)} than rank 0",
                    hint="copy the same files to all machines, under the same path",
                )

        self._wait_for("loaded", check)
        cache = {name: getattr(runner.config, name) for name in ("num_slots", "block", "spare_blocks")}
        self.channel.send({"do": "start", "cache": cache})
        self._wait_for("ready")
        self._runner = LeadingRunner(runner, self.channel, explain=self.explain, watching=self._watching)
        return self._runner

    def _wait_for(self, key: str, check: Callable[[int, dict[str, Any]], None] = lambda rank, said: None) -> None:
        """Wait until every rank has set `key` in the store. Raises RankError if a rank ends or hangs before."""
        missing = set(range(1, self.size))
        watch = self._beat_watch()
        while missing:
            for rank in sorted(missing):
                if self._seen.check([f"{key}/{rank}"]):
                    check(rank, json.loads(self._seen.get(f"{key}/{rank}")))
                    missing.discard(rank)
            failure = self._failure_of(missing) or watch.silent(missing)
            if failure is not None:
                raise self._rank_error(*failure)
            time.sleep(_POLL_S if missing else 0)

    def explain(self, error: BaseException) -> LlamaAdapterError:
        """The error that says which rank failed and why, after a call on this rank raised `error`. Ends all ranks."""
        if isinstance(error, LlamaAdapterError):
            failure = error
        elif isinstance(error, CollectiveError):
            failure = self._named_failure(error)
        else:
            problem = describe(error)
            found = self._failure_of(set(range(1, self.size))) if self._step_watch is not None else None
            failure = self._rank_error(*(found or (0, problem.sentence, problem.hint)))
        self._kill()
        return failure

    def _named_failure(self, error: BaseException) -> RankError:
        """The error that names the rank that made a collective fail.

        This is a rank that reported an error or has ended, otherwise a rank that does not respond.
        """
        others = set(range(1, self.size))
        watch = self._beat_watch()
        until = time.monotonic() + _NAMING_S
        found = None
        while found is None and time.monotonic() < until:
            followed = {rank for rank in others if self._seen.check([followed_key(rank)])}
            found = self._failure_of(others) or watch.silent(others - followed, beats=FEW_BEATS)
            time.sleep(_POLL_S)
        if found is not None:
            return self._rank_error(*found)
        return RankError(
            f"The {self.size} ranks of the decoder cannot reach each other: {error}",
            hint="look at the log of the other ranks, and at the network between them",
        )

    def _beat_watch(self) -> BeatWatch:
        return BeatWatch(self._seen, may_have_ended=not self._children)

    def _watch_steps(self, spec: CaptionerSpec, *, collectives: Collectives) -> None:
        """Watch the other ranks in every step, if the device would wait forever for a rank that has failed."""
        library, others, watch = LIBRARIES[collectives], set(range(1, self.size)), self._beat_watch()
        if not library.is_queued:
            return

        def find(stalled_s: float) -> RankError | None:
            failed, silent = self._failure_of(others), watch.silent(others, beats=FEW_BEATS)
            if failed is None and stalled_s > spec.parallel_timeout:
                failed = silent
            if failed is not None:
                return self._rank_error(*failed)
            if stalled_s > spec.parallel_timeout + _NAMING_S:
                return RankError(
                    f"The {self.size} ranks of the decoder made no progress in a step for {stalled_s:.0f} s",
                    hint="one of them may hang; --parallel-timeout gives more time, such as to compile operators",
                )
            return None

        self._step_watch = StepWatch(
            find=find,
            progress=lambda: self.ranks.num_calls if self._has_joined else 0,
            release=lambda: library.abort(self._backend.device),
        )

    def _watching(self) -> AbstractContextManager[None]:
        return nullcontext() if self._step_watch is None else self._step_watch.watching()

    def _failure_of(self, others: set[int]) -> Failure | None:
        """A rank that has failed by itself, not because another rank failed; None if there is none."""
        for rank in sorted(others):
            if self._seen.check([error_key(rank)]):
                said = json.loads(self._seen.get(error_key(rank)))
                return rank, said["sentence"], said["hint"]
        for rank in sorted(others & self._children.keys()):
            child = self._children[rank]
            if child.has_ended() and child.process.returncode < 0:
                return rank, f"ended {child.how_it_ended()}", _hint_of_signal(-child.process.returncode)
        for rank in sorted(others & self._children.keys()):
            child = self._children[rank]
            if child.has_ended() and child.process.returncode != SECONDARY:
                return rank, f"ended {child.how_it_ended()}", "its own messages are above"
        return None

    def _rank_error(self, rank: int, sentence: str, hint: str) -> RankError:
        process = f" (process {self._children[rank].process.pid})" if rank in self._children else ""
        return RankError(f"Rank {rank} of {self.size}{process} failed: {sentence}", hint=hint)

    def close(self) -> None:
        """End all other ranks. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._runner is not None and self._runner.is_usable:
            with suppress(RuntimeError):
                self.channel.send({"do": "stop"})
            for child in self._children.values():
                child.has_ended(within_s=_END_S)
        self._kill()
        if self._step_watch is not None:
            self._step_watch.close()
        if self._has_joined:
            self.channel.close()
            with suppress(RuntimeError):
                leave()
        if self._folder is not None:
            self._folder.cleanup()
        self._restore_cores()

    def _kill(self) -> None:
        for child in self._children.values():
            child.release()  # the child ends when this end of its pipe is closed
            if not child.has_ended(within_s=_END_S):
                child.process.kill()
                child.process.wait()


def _hint_of_signal(number: int) -> str:
    """A hint on what to do after a signal has ended a rank."""
    if number == signal.SIGKILL:
        return "the system may have killed it because memory ran out: see `dmesg`; try a smaller --batch-size"
    if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        return "another program ended it, such as a job scheduler at its time limit; start the command again"
    return "this is a fault of the program or of a driver: `dmesg` may say more"
