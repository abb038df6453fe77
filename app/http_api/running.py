"""Runs an application under uvicorn on a bound socket, and drains the service when it is asked to end."""

import asyncio
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from llama_adapter.app.http_api.connections import Connection
from llama_adapter.app.online.service import Service
from llama_adapter.runtime.errors import LlamaAdapterError

_FLUSH_S = 5  # for responses that are ready when the service is idle
_STALLED_MS = 60_000  # a client that takes nothing of what is sent for so long is given up


class Draining(uvicorn.Server):
    """Asked to end, it refuses new requests, answers those that it has, and ends then; asked twice, it ends at once.

    While it drains it goes on listening, so that who asks is told (503) and no connection is lost.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        service: Service,
        drain_s: float,
        tell: Callable[[str], None],
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_start = on_start
        self.ended_by: int | None = None  # the signal that asked for it
        self._service, self._drain_s, self._tell = service, drain_s, tell
        self._drains_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks to drain, the second one to end."""
        if self.ended_by is not None:
            self.should_exit = self.force_exit = True
        self.ended_by = self.ended_by or sig

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, and that of a terminal that is closed; `nohup` has it ignored, and so it stays."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says that connections are taken from now on."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self.ended_by is not None and self._drains_until is None:
            self._service.drain()
            self._drains_until = time.monotonic() + self._drain_s
            status = self._service.status()
            self._tell(f"draining: {status.num_running} requests running, {status.num_waiting} waiting")
        if self._drains_until is not None:
            is_idle = self._service.wait_until_idle(0)
            is_late = time.monotonic() > self._drains_until
            if is_late and not is_idle:
                self._tell(f"not drained after {self._drain_s:g} s: what is left is cancelled")
                # Not here: meanwhile the event loop tells the clients.
                await asyncio.to_thread(self._service.close)
            if is_idle or is_late:
                return True
        return await super().on_tick(counter)


class AddressError(LlamaAdapterError):
    """The server cannot listen at this address."""

    default_hint = "choose another --port (0 takes a free one), or an address of this machine as --host"


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not listening yet; raises AddressError where that address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, so that the event loop turns off the waiting for more to send (40 ms an answer).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections have it of their listener
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        said = f"Cannot listen at {host} port {port}: {reason[0].lower()}{reason[1:]}"
        raise AddressError(said) from error
    return listener


def run(
    application: Any,  # ASGI
    *,
    listener: socket.socket,
    service: Service,
    drain_s: float,
    tell: Callable[[str], None],
    on_start: Callable[[], None] = lambda: None,
) -> int | None:
    """Serve until a signal comes; returns it, or None where the application itself ended."""
    config = uvicorn.Config(
        application,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,  # who asks is told by the connection: a header can be forged
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_FLUSH_S,
        limit_concurrency=_max_connections(),
    )
    server = Draining(config, service=service, drain_s=drain_s, tell=tell, on_start=on_start)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return server.ended_by


def _max_connections() -> int:
    """So many that files can still be opened."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(8192, (soft_limit if soft_limit > 0 else 8192) - 200))


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
