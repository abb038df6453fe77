"""The first rank's view of all: starts them or meets those of `torchrun`, loads their shares, and ends them."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch

from llama_adapter import __version__
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.parallel.cores import bind_to, cores_of_ranks
from llama_adapter.app.parallel.fingerprint import weights_fingerprint
from llama_adapter.app.parallel.launch import checked_launch
from llama_adapter.app.parallel.rendezvous import (
    BEAT_S,
    SECONDARY,
    beat_key,
    environment_store,
    error_key,
    followed_key,
    host_store,
    join,
    leave,
)
from llama_adapter.llm.load import PlacedDecoder
from llama_adapter.llm.parallel.leader import LeadingRunner
from llama_adapter.llm.runners.base import Runner
from llama_adapter.runtime.child_process import ChildProcess
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.ranks import CollectiveError
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.scheme import dtype_name

ENTRY: Final = "llama_adapter.app.parallel.rank_process:main"
_POLL_S: Final = 0.05
_END_S: Final = 5.0  # that a rank has to end by itself
_MISSED_BEATS: Final = 8


class RankError(LlamaAdapterError):
    """A rank that ended, hangs, or does not fit the others. All of them end with it."""

    http_status = 503


class RankGroup:
    """All ranks of one model. `ranks.rank` is 0."""

    def __init__(self, spec: CaptionerSpec, *, backend: Backend) -> None:
        """Start the other ranks, or meet those that `torchrun` started. Raises RankError and UsageError."""
        self.size = spec.tensor_parallel
        self._backend = backend
        self._children: dict[int, ChildProcess] = {}
        self._runner: LeadingRunner | None = None
        self._is_closed, self._has_joined = False, False
        self._restore_cores: Callable[[], None] = lambda: None
        place = checked_launch(spec.tensor_parallel)
        try:
            if place is None:
                self._store = host_store(self.size)
                self._start_ranks(spec)
            else:
                self._store = environment_store()
            self.ranks, self.channel = self._join(spec)
            self._has_joined = True
        except BaseException:
            self.close()
            raise

    @property
    def share_memory(self) -> bool:
        """Whether all ranks take memory of this host."""
        return bool(self._children) and self._backend.device.type == "cpu"

    def _start_ranks(self, spec: CaptionerSpec) -> None:
        device = self._backend.device
        cores = cores_of_ranks(self.size) if device.type == "cpu" else [None] * self.size
        for rank in range(1, self.size):
            started = {
                "rank": rank,
                "size": self.size,
                "port": self._store.port,
                "device": str(device) if device.type == "cpu" else f"{device.type}:{(device.index or 0) + rank}",
                "timeout_s": spec.parallel_timeout,
                "cores": cores[rank],
            }
            environ = {"GLOO_SOCKET_IFNAME": "lo"} if "GLOO_SOCKET_IFNAME" not in os.environ else {}
            self._children[rank] = ChildProcess(ENTRY, json.dumps(started), environ=environ, watch_parent=True)
        if cores[0] is not None:
            self._restore_cores = bind_to(cores[0])

    def _join(self, spec: CaptionerSpec) -> Any:
        self._wait_for("hello", self._check_version)
        if self._children:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            return join(
                self._store,
                rank=0,
                size=self.size,
                collectives=self._backend.capabilities.collectives,
                timeout_s=spec.parallel_timeout,
                device=self._backend.device,
            )
        except RuntimeError as error:  # of several classes
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

    def load(self, spec: CaptionerSpec, *, dtype: torch.dtype, precision: Precision, random: object = None) -> None:
        """Tell the other ranks to load their shares, without waiting for them."""
        wanted = dataclasses.replace(spec, dtype=dtype_name(dtype), precision=precision, batch_size=1)
        self.channel.send(
            {
                "do": "load",
                "spec": dataclasses.asdict(wanted),
                "random": dataclasses.asdict(random) if isinstance(random, RandomLoader) else None,
            }
        )

    def lead(self, decoder: PlacedDecoder, runner: Runner) -> LeadingRunner:
        """The runner of all ranks, once they have loaded their shares. Raises RankError."""
        ours = weights_fingerprint(decoder.decoder)

        def check(rank: int, said: dict[str, Any]) -> None:
            if said["weights"] != ours:
                raise RankError(
                    f"Rank {rank} of {self.size} has other weights than rank 0",
                    hint="copy the same model to all machines, under the same path",
                )

        self._wait_for("loaded", check)
        self.channel.send({"do": "start", "num_slots": runner.config.num_slots})
        self._wait_for("ready")
        self._runner = LeadingRunner(runner, self.channel, explain=self.explain)
        return self._runner

    def _wait_for(self, key: str, check: Callable[[int, dict[str, Any]], None] = lambda rank, said: None) -> None:
        """Wait until every rank has said `key` in the store. Raises RankError for one that ends or hangs before."""
        missing = set(range(1, self.size))
        watch = _Watch(self._store)
        while missing:
            for rank in sorted(missing):
                if self._store.check([f"{key}/{rank}"]):
                    check(rank, json.loads(self._store.get(f"{key}/{rank}")))
                    missing.discard(rank)
            failure = self._failure_of(missing) or watch.silent(missing)
            if failure is not None:
                raise self._rank_error(*failure)
            time.sleep(_POLL_S if missing else 0)

    def explain(self, error: BaseException) -> LlamaAdapterError:
        """Which rank failed and why, after a call of this rank has raised `error`; the others are ended."""
        if isinstance(error, LlamaAdapterError):
            failure = error
        elif isinstance(error, CollectiveError):
            failure = self._named_failure(error)
        else:
            problem = describe(error)
            failure = self._rank_error(0, problem.sentence, problem.hint)
        self._kill()
        return failure

    def _named_failure(self, error: BaseException) -> RankError:
        """Who made a collective fail: a rank that says so or has ended, else one that does not respond."""
        others = set(range(1, self.size))
        watch = _Watch(self._store)
        until = time.monotonic() + (_MISSED_BEATS / 2) * BEAT_S
        found = None
        while found is None and time.monotonic() < until:
            followed = {rank for rank in others if self._store.check([followed_key(rank)])}
            found = self._failure_of(others) or watch.silent(others - followed, beats=2)
            time.sleep(_POLL_S)
        if found is not None:
            return self._rank_error(*found)
        return RankError(
            f"The {self.size} ranks of the decoder cannot reach each other: {error}",
            hint="look at the log of the other ranks, and at the network between them",
        )

    def _failure_of(self, others: set[int]) -> tuple[int, str, str] | None:
        """The rank, sentence and hint of one that has failed by itself."""
        for rank in sorted(others):
            if self._store.check([error_key(rank)]):
                said = json.loads(self._store.get(error_key(rank)))
                return rank, said["sentence"], said["hint"]
        for rank in sorted(others & self._children.keys()):
            child = self._children[rank]
            if child.has_ended() and child.process.returncode < 0:
                hint = "the system may have killed it for want of memory: see `dmesg`; try a smaller --batch-size"
                return rank, f"ended {child.how_it_ended()}", hint
        for rank in sorted(others & self._children.keys()):
            child = self._children[rank]
            if child.has_ended() and child.process.returncode != SECONDARY:
                return rank, f"ended {child.how_it_ended()}", "its own messages stand above"
        return None

    def _rank_error(self, rank: int, sentence: str, hint: str) -> RankError:
        process = f" (process {self._children[rank].process.pid})" if rank in self._children else ""
        return RankError(f"Rank {rank} of {self.size}{process} failed: {sentence}", hint=hint)

    def close(self) -> None:
        """End all other ranks. Can be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._runner is not None and self._runner.is_usable:
            with suppress(RuntimeError):
                self.channel.send({"do": "stop"})
            for child in self._children.values():
                child.has_ended(within_s=_END_S)
        self._kill()
        if self._has_joined:
            with suppress(RuntimeError):
                leave()
        self._restore_cores()

    def _kill(self) -> None:
        for child in self._children.values():
            child.release()  # it watches this end
            if not child.has_ended(within_s=_END_S):
                child.process.kill()
                child.process.wait()


class _Watch:
    """Finds ranks whose beats have stopped."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._last: dict[int, tuple[bytes, float]] = {}

    def silent(self, ranks: set[int], *, beats: float = _MISSED_BEATS) -> tuple[int, str, str] | None:
        """Rank, sentence and hint of one without a beat for some seconds; None if all have one, or none yet."""
        now = time.monotonic()
        for rank in sorted(ranks):
            if not self._store.check([beat_key(rank)]):
                continue
            beat = self._store.get(beat_key(rank))
            if self._last.get(rank, (b"", 0.0))[0] != beat:
                self._last[rank] = beat, now
            elif now - self._last[rank][1] > beats * BEAT_S:
                return rank, "it does not respond: it is stopped or hangs", "see what it does, or start again"
        return None
