"""Connections over real sockets that send nothing, send one byte at a time, or never end."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send

from llama_adapter.app.serving.http_api import running
from llama_adapter.app.serving.http_api.running import Connection, bind
from tests.app.golden import ROOT
from tests.app.serving.http_api.live import served

ASKED = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
NEWS = ASKED.replace(b"/ ", b"/news ", 1)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once; for the path /news, with a stream until the client disconnects."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/news":
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.body", "body": b"answer"})


def connected(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(running, "HEAD_S", 0.3)
    with served(application, http=Connection) as url, connected(url) as client:
        yield client


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
def test_connection_without_a_request_is_closed(client: socket.socket, begun: bytes, trickle: bytes) -> None:
    client.sendall(begun)
    assert (0 if trickle else 0.2) < seconds_open(client, trickle=trickle) < 5


def test_no_head_timeout_while_answering(client: socket.socket) -> None:
    client.sendall(NEWS)
    time.sleep(0.5)
    client.settimeout(0.2)
    assert client.recv(4096).startswith(b"HTTP/1.1 200")
    with pytest.raises(TimeoutError):
        client.recv(4096)


def test_keep_alive_after_an_answer(client: socket.socket) -> None:
    client.settimeout(5)
    for _ in range(3):
        client.sendall(ASKED[:20])
        time.sleep(0.15)
        client.sendall(ASKED[20:])
        answer = b""
        while b"answer" not in answer:
            answer += client.recv(4096) or b"closed, no answer"
        assert b"closed" not in answer


def test_an_offer_of_http_2_is_answered_and_leaves_no_line(
    client: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    client.settimeout(5)
    offer = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n\r\n"
    with caplog.at_level("INFO"):
        client.sendall(ASKED.replace(b"\r\n\r\n", offer))
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
    assert [record for record in caplog.records if "pgrade" in record.message or "WebSocket" in record.message] == []


def test_connections_far_beyond_the_limit_leave_files_for_the_others() -> None:
    with served(application, http=Connection, limit_concurrency=3) as url, ExitStack() as stack:
        first, *others = [stack.enter_context(closing(connected(url))) for _ in range(60)]
        assert max(map(seconds_open, others[-7:])) < 5, "53 remain"
        for client in (first, others[0]):
            client.settimeout(5)
            client.sendall(ASKED)
            assert client.recv(4096).startswith(b"HTTP/1.1 503")


FEW_FILES = """
import resource
from llama_adapter.app.serving.http_api.running import bind, run

async def application(scope, receive, send):
    await receive()
    await send({"type": "lifespan.startup.complete"})

resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
listener = bind("127.0.0.1", 0)
port = listener.getsockname()[1]
run(application, listener=listener, service=None, drain_s=0, tell=print, on_start=lambda: print(port, flush=True))
"""


def test_a_burst_of_connections_waits_in_the_queue_and_uses_up_no_files() -> None:
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([sys.executable, "-c", FEW_FILES], stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        assert server.stdout is not None
        place = ("127.0.0.1", int(server.stdout.readline()))
        server.send_signal(signal.SIGSTOP)  # all of them come in one turn
        clients = [stack.enter_context(socket.create_connection(place, timeout=0.5)) for _ in range(400)]
        server.send_signal(signal.SIGCONT)
        clients[-1].settimeout(20)
        assert clients[-1].recv(1) == b"", "far beyond the limit: closed before HEAD_S"
        server.kill()
        assert server.communicate()[1] == "", "asyncio: out of system resource"


def test_endless_streams_do_not_delay_shutdown() -> None:
    with ExitStack() as server, connected(server.enter_context(served(application, http=Connection))) as client:
        client.settimeout(5)
        client.sendall(NEWS)
        assert b"200" in client.recv(4096)
        started = time.monotonic()
        server.close()
        while client.recv(4096):
            pass
        assert time.monotonic() - started < 3


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_connections_have_tcp_user_timeout() -> None:
    with closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), closing(listener.accept()[0]) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
