"""Runs an application under uvicorn on a bound socket, drains the service at the end, and closes idle connections."""

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
from uvicorn.protocols.http.h11_impl import H11Protocol

from llama_adapter.app.serving.online.base import OnlineService
from llama_adapter.runtime.errors import LlamaAdapterError

HEAD_S = 30.0  # from a connection's start, or the first byte after an answer, to a complete request head
_ACCEPTED_PER_TURN = 30  # connections, in one turn of the event loop
_QUEUED = 2048  # connections that the system holds until they are accepted
_FLUSH_S = 5  # time to send the last answers, after the service became idle
_STALLED_MS = 60_000  # a client that reads nothing for this time is disconnected


class Connection(H11Protocol):
    """A uvicorn connection that closes if no request arrives in time, so that idle clients cannot hold all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the timer for the first request. Far beyond the limit of connections, close this one."""
        super().connection_made(transport)
        self._update_timer()
        if len(self.connections) > (self.limit_concurrency or 8192) + 50:  # others get 503
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """A complete head stops the timer; single bytes do not extend it."""
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: answers are sent completely, but the page's endless event stream (GET) is closed."""
        super().shutdown()
        if self._is_answering and self.scope["method"] == "GET":
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """No lines in the log: Java's clients offer HTTP/2 with every request, and are answered in HTTP/1.1."""

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update_timer(self) -> None:
        if self._is_answering:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Draining(uvicorn.Server):
    """A server that drains. On the first signal it refuses new requests (503), answers accepted requests and ends.

    On the second signal it ends at once. It listens while it drains, so that every client gets an answer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        service: OnlineService,
        drain_s: float,
        tell: Callable[[str], None],
        on_start: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.ended_by: int | None = None  # the first signal
        self._service, self._drain_s, self._tell, self._on_start = service, drain_s, tell, on_start
        self._drains_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal; `on_tick` acts on it."""
        if self.ended_by is not None:
            self.should_exit = self.force_exit = True
        self.ended_by = self.ended_by or sig

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle uvicorn's signals and SIGHUP (a closed terminal). SIGHUP stays ignored if `nohup` ignores it."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Call `on_start` once connections are accepted."""
        await super().startup(sockets)
        if self.started:
            for listener in sockets or ():
                listener.listen(_QUEUED)
            self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether the server ends."""
        if self.ended_by is not None and self._drains_until is None:
            self._service.drain()
            self._drains_until = time.monotonic() + self._drain_s
            status = self._service.status()
            self._tell(f"draining: {status.num_running} requests running, {status.num_waiting} waiting")
        if self._drains_until is not None:
            if self._service.wait_until_idle(0):
                return True
            if time.monotonic() > self._drains_until:
                self._tell(f"not drained after {self._drain_s:g} s: the remaining requests are cancelled")
                # In a thread, so that the event loop can answer the clients.
                await asyncio.to_thread(self._service.close)
                return True
        return await super().on_tick(counter)


class AddressError(LlamaAdapterError):
    """The server cannot listen at this address."""

    default_hint = "choose another --port (0 takes a free one), or an address of this machine as --host"


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; raises AddressError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # If the protocol is given, asyncio turns off Nagle's algorithm, which delays answers by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_MS)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise AddressError(f"Cannot listen at {host} port {port}: {reason[0].lower()}{reason[1:]}") from error
    return listener


def run(
    application: Any,  # ASGI
    *,
    listener: socket.socket,
    service: OnlineService,
    drain_s: float,
    tell: Callable[[str], None],
    on_start: Callable[[], None] = lambda: None,
) -> int | None:
    """Serve until a signal arrives; returns it, or None if the application ended by itself.

    `drain_s` is the time in seconds for answering accepted requests after the signal.
    """
    config = uvicorn.Config(
        application,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        proxy_headers=False,  # a client is identified by its connection, because a header can be forged
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_FLUSH_S,
        limit_concurrency=_max_connections(),
        # asyncio accepts this many in one turn, so that those beyond the limit are closed before files run out. It also
        # makes the system's queue this short; `startup` lengthens it.
        backlog=_ACCEPTED_PER_TURN,
    )
    server = Draining(config, service=service, drain_s=drain_s, tell=tell, on_start=on_start)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return server.ended_by


def _max_connections() -> int:
    """Connections above which requests get 503: 200 fewer than files may be open, from 16 to 8192.

    The 200 are for 50 more connections, for those that were accepted and are to be closed, and for other files.
    """
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(8192, (soft_limit if soft_limit > 0 else 8192) - 200))


def address_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
