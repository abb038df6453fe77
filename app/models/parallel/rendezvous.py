"""How ranks join: a key-value store, and process groups of `torch.distributed` that use it.

Under `torchrun`, the environment gives the store, the rank and the number of ranks. Whoever reaches the port of this
store can read and change it. Otherwise the first rank starts the others on this machine: then the store is a file in a
private folder, and messages between ranks go through inherited sockets (messages.py).
"""

import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, and not in __all__
from torch.distributed.rendezvous import rendezvous

from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.launch import LOOPBACK, Launched
from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.runtime.device_names import split_device
from llama_adapter.runtime.devices.base import Collectives
from llama_adapter.runtime.devices.collectives import LIBRARIES
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.ranks import Ranks, collective
from llama_adapter.runtime.text import one_line

BEAT_S: Final = 1.0
FIRST_DEVICE: Final = "device"  # the store's key for the device of the first rank
SECONDARY: Final = 75  # exit code of a rank that ended because another one did
_END_BEATS: Final = 10
_IDLE: Final = timedelta(days=3650)  # a service may wait for its next request
_SPARE_S: Final = 5.0  # torch may exceed its own timeout by this time
_MOST_REASON: Final = 200  # characters of torch's message that are shown


def environment_store(place: Launched, *, timeout_s: float) -> Any:
    """Wait until all ranks have joined the store that `torchrun` names; returns the store.

    Raises RankError if this takes longer than `timeout_s` seconds, or the port is in use.
    """
    port = os.environ["MASTER_PORT"]
    try:
        return _met(place, timeout_s)
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise RankError(
                f"Rank {place.rank} of {place.size} cannot listen on port {port}, which MASTER_PORT names: it is taken",
                hint="set MASTER_PORT to a free port, the same one for all ranks",
            ) from None
        raise RankError(
            f"Rank {place.rank} of {place.size} did not meet the others at {os.environ['MASTER_ADDR']}, port {port}, "
            f"within {timeout_s:g} s: {one_line(str(error))[:_MOST_REASON]}",
            hint="all ranks need the address and port of rank 0 in MASTER_ADDR and MASTER_PORT, its firewall has to "
            "let them in, and all have to be started within --parallel-timeout",
        ) from None


def _met(place: Launched, timeout_s: float) -> Any:
    """The store of the environment. Raises RuntimeError, also in a case in which torch waits forever.

    This is a server that accepts the connection and sends nothing.
    """
    found: Future[Any] = Future()

    def meet() -> None:
        try:
            found.set_result(_open_store(place, timedelta(seconds=timeout_s)))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=meet, name="rendezvous", daemon=True).start()
    try:
        return found.result(timeout_s + _SPARE_S)
    except TimeoutError:
        raise RuntimeError("the server there does not answer like a rank") from None


def _open_store(place: Launched, timeout: timedelta) -> Any:
    """The store of the environment. If this rank serves it, for this machine alone, it listens on loopback only."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if place.rank > 0 or address not in LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return next(iter(rendezvous("env://", timeout=timeout)))[0]
    listener = socket.create_server(("127.0.0.1", port))
    return TCPStore(address, port, place.size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def device_of(place: Launched, first: str) -> str:
    """The device of a rank. On every machine, ranks use devices in order, from the index of `first` on."""
    kind, index = split_device(first)
    return kind if index is None else f"{kind}:{index + place.local_rank}"


def require_no_group() -> None:
    """Raise UsageError if this process is in a process group already: `torch.distributed` allows one."""
    if dist.is_initialized():
        raise UsageError(
            "This process has a process group of torch.distributed already",
            hint="close the other captioner, or destroy your own group, before you load a model on several ranks",
        )


def join(
    store: Any, place: Launched, *, collectives: Collectives, timeout_s: float, device: torch.device
) -> tuple[Ranks, Channel]:
    """Join the process groups for the devices and for commands; returns when all ranks have joined.

    This process must not be in a group yet. Raises CollectiveError.
    """
    rank, size = place.rank, place.size
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    library, timeout = LIBRARIES[collectives], timedelta(seconds=timeout_s)
    variables = library.variables(timeout_s) | ({"GLOO_SOCKET_IFNAME": "lo"} if place.is_local else {})
    prefixed = PrefixStore("ranks", store)
    dist.distributed_c10d._world.group_count = 0  # part of the groups' names; a failed start has increased it
    try:
        with _environment(variables), collective():
            dist.init_process_group(collectives, store=prefixed, rank=rank, world_size=size, timeout=timeout)
            group = dist.new_group(backend="gloo", timeout=timeout if rank == 0 else _IDLE)  # others wait for commands
            ranks = Ranks(rank=rank, size=size, collectives=collectives)
            if library.is_queued:  # it connects, and reads the variables, in its first collective
                ranks.sum(torch.zeros(1, device=device)).cpu()
    except BaseException:
        leave()
        raise
    return ranks, Channel(group)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, except those that are already set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def leave() -> None:
    """Destroy the process groups of `join`."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Beats:
    """Heartbeats: sets a key of the store once a second. Ends this process if the first rank has ended.

    Ctrl-C and the SIGTERM of `torchrun` reach all ranks. The first rank then writes its records and ends the others. A
    rank that is still running ten seconds after a SIGTERM ends by itself. A thread waits for the signal, because the
    main thread may be inside a collective, where Python handles no signals.
    """

    def __init__(self, store: Any, rank: int, *, is_launched: bool) -> None:
        """With `is_launched`, call it in the main thread before other threads start: they inherit its signal mask."""
        if is_launched:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._store, self._key = store.clone(), beat_key(rank)  # separate: calls on the other connection may block
        self._ended = threading.Event()
        self._store.set(self._key, "0")
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def _beat(self) -> None:
        count, most = 0, float("inf")
        while not self._ended.is_set():
            if signal.sigtimedwait({signal.SIGTERM}, BEAT_S) is not None:
                most = count + _END_BEATS
            count += 1
            try:
                self._store.set(self._key, str(count))
            except RuntimeError:
                most = 0
            if count > most and not self._ended.is_set():
                os._exit(SECONDARY)

    def end(self) -> None:
        self._ended.set()


def beat_key(rank: int) -> str:
    return f"beat/{rank}"


def followed_key(rank: int) -> str:
    """The key that a rank sets if it ends because another rank did."""
    return f"followed/{rank}"


def error_key(rank: int) -> str:
    return f"error/{rank}"
