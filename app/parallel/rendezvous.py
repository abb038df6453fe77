"""How ranks find each other: a store of the first rank, and process groups of `torch.distributed` over it.

Under `torchrun` the environment names store, rank and number of ranks. Else the first rank starts the others on this
machine, and the store listens on the loopback interface only.
"""

import os
import signal
import socket
import threading
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, and not in __all__
from torch.distributed.rendezvous import rendezvous

from llama_adapter.llm.parallel.channel import Channel
from llama_adapter.runtime.devices.base import Collectives
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.ranks import Ranks

BEAT_S: Final = 1.0
SECONDARY: Final = 75  # exit code of a rank that ended because another one did
_END_BEATS: Final = 10
DEFAULT_TIMEOUT_S: Final = 60.0
_IDLE: Final = timedelta(days=3650)  # a service may wait for its next request
_LOOPBACK = "127.0.0.1"


def host_store(size: int) -> Any:
    """A store of this process for ranks on this machine; `port` is where it listens."""
    listener = socket.socket()
    listener.bind((_LOOPBACK, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return TCPStore(_LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def find_store(port: int, size: int) -> Any:
    """The store of the process that started this one. Raises RuntimeError if it has ended."""
    return TCPStore(_LOOPBACK, port, size, is_master=False, timeout=timedelta(seconds=DEFAULT_TIMEOUT_S))


def environment_store() -> Any:
    """The store that `torchrun` names. Raises RuntimeError where it cannot be opened, such as for a port in use."""
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=DEFAULT_TIMEOUT_S))))
    return store


def join(
    store: Any, *, rank: int, size: int, collectives: Collectives, timeout_s: float, device: torch.device
) -> tuple[Ranks, Channel]:
    """Join the process groups for the devices and for commands; returns when all ranks have. Raises RuntimeError."""
    if dist.is_initialized():
        raise UsageError(
            "This process has a process group of torch.distributed already",
            hint="close the other captioner, or destroy your own group, before you load a model on several ranks",
        )
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(collectives, store=PrefixStore("ranks", store), rank=rank, world_size=size, timeout=timeout)
    group = dist.new_group(backend="gloo", timeout=timeout if rank == 0 else _IDLE)  # others wait for commands
    return Ranks(rank=rank, size=size, collectives=collectives), Channel(group)


def leave() -> None:
    """Forget the process groups of `join`."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Beats:
    """Says in the store, once a second, that this process runs; ends it when the first rank has ended.

    Ctrl-C and the SIGTERM of `torchrun` reach all ranks. The first one writes its records and ends the others; one that
    it does not end within ten seconds of a SIGTERM ends by itself. The main thread may be inside a collective, where
    Python handles no signals, so a thread waits for them.
    """

    def __init__(self, store: Any, rank: int, *, is_launched: bool) -> None:
        """In the main thread of a rank that `torchrun` launched, before others: they inherit its mask of signals."""
        if is_launched:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self._store, self._key = store.clone(), beat_key(rank)  # a connection of its own: calls of others may wait
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
    """Set by a rank that ends because another one did."""
    return f"followed/{rank}"


def error_key(rank: int) -> str:
    return f"error/{rank}"
