"""Connections over real sockets that send nothing, send one byte at a time, or never end."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from llama_adapter.app.serving.http_api import running
from llama_adapter.app.serving.http_api.running import Connection, bind

ASKED = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once; for the path /news, with a stream until the client disconnects."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/news":
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.body", "body": b"answer"})


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(running, "HEAD_S", 0.3)
    with serving() as (address, _):
        yield address


@contextmanager
def serving() -> Iterator[tuple[tuple[str, int], uvicorn.Server]]:
    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        config = uvicorn.Config(application, http=Connection, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname(), server
        finally:
            server.should_exit = True
            thread.join()


def seconds_open(client: socket.socket, *, trickle: bytes = b"") -> float:
    """How long the server keeps a connection open. During this time `trickle` is sent one byte at a time."""
    started = time.monotonic()
    client.settimeout(0.05)
    for index in range(200):
        try:
            if trickle:
                client.sendall(trickle[index % len(trickle) :][:1])
            if client.recv(4096) == b"":
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("begun", "trickle"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nHost: ", b""),
        (b"GET / HTTP/1.1\r\nX: ", b"a"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", b"a"),
    ],
)
def test_connection_without_a_request_is_closed(address: tuple[str, int], begun: bytes, trickle: bytes) -> None:
    with socket.create_connection(address) as client:
        client.sendall(begun)
        assert (0 if trickle else 0.2) < seconds_open(client, trickle=trickle) < 5


def test_no_head_timeout_while_answering(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        client.sendall(ASKED.replace(b"/ ", b"/news ", 1))
        time.sleep(0.8)
        client.settimeout(0.2)
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        with pytest.raises(TimeoutError):
            client.recv(4096)


def test_keep_alive_after_an_answer(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client:
        client.settimeout(5)
        for _ in range(3):
            client.sendall(ASKED[:20])
            time.sleep(0.15)
            client.sendall(ASKED[20:])
            answer = b""
            while b"answer" not in answer:
                answer += client.recv(4096) or b"closed, no answer"
            assert b"closed" not in answer


def test_endless_streams_do_not_delay_shutdown() -> None:
    with serving() as (address, server), socket.create_connection(address) as client:
        client.settimeout(5)
        client.sendall(ASKED.replace(b"/ ", b"/news ", 1))
        assert b"200" in client.recv(4096)
        started = time.monotonic()
        server.should_exit = True
        while client.recv(4096):
            pass
        assert time.monotonic() - started < 3


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_connections_have_tcp_user_timeout() -> None:
    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), closing(listener.accept()[0]) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
