"""One connection as uvicorn has it, and what ends it where uvicorn would wait for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # from a connection's beginning, or the first byte after an answer, to a whole head of a request


class Connection(H11Protocol):
    """Is closed when no request comes in time: who only holds connections open would keep others from theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """The time for the first request begins."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """The time ends with a whole head, and not with each of its bytes."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._forget()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: what is answered is sent. The page's news, a stream without an end, ends here."""
        super().shutdown()
        if self._is_answering and self.scope["method"] == "GET":
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        if self._is_answering:
            self._forget()
        elif self._asking is None:
            self._asking = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
