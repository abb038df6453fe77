"""`llama-adapter serve` as a process: it says where it is, ends as it is asked to, and says what it cannot do."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.models.resources import sample_pictures

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted(path for path in sample_pictures().iterdir() if path.suffix == ".png")
pytestmark = pytest.mark.slow


class Server:
    """A process that serves, and what it says."""

    def __init__(self, *flags: str, command: str = "serve", folder: Path | None = None, reads_on: bool = True) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "LLAMA_ADAPTER_API_KEY"}
        if folder is not None:
            environment["TMPDIR"] = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama_adapter", command, "--port", "0", *flags],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            # Signals of whoever runs the tests are not its own.
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.address = self._read_to("serving on ").removeprefix("serving on ")
        self._reading = threading.Thread(target=self._read_on if reads_on else lambda: None, daemon=True)
        self._reading.start()

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; the exit code and all that was said."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.close()
        return code, "\n".join(self.lines)

    def close(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read_to(self, beginning: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return self.lines[-1]
        raise AssertionError(f"it ended: {self.lines}")

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        self.lines += [line.rstrip("\n") for line in self.process.stderr]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def chat(address: str, *, picture: Path = PICTURES[0], **more: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    content = [
        {"type": "text", "text": "Generate caption of this image"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = json.dumps({"model": "default", "messages": [{"role": "user", "content": content}], **more}).encode()
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        reply: dict[str, Any] = json.load(response)
        return reply


def test_it_answers_and_ends_by_sigterm_with_zero(server: Server) -> None:
    reply = chat(server.address)
    code, said = server.end(signal.SIGTERM)

    assert reply["choices"][0]["message"]["content"] == "a small yellow moon above a small green cross"
    assert code == 0
    assert re.search(r"POST /v1/chat/completions 200 \d+ ms", said)
    assert "moon" not in said
    assert "base64" not in said


def test_ctrl_c_ends_it_with_130(server: Server) -> None:
    assert server.end(signal.SIGINT)[0] == 130


@pytest.mark.parametrize("command", ["serve", "web"])
def test_a_closed_terminal_ends_it_as_sigterm_does(tmp_path: Path, command: str) -> None:
    server = Server(command=command, folder=tmp_path)
    code, said = server.end(signal.SIGHUP)

    assert code == 0
    assert "draining" in said
    assert not any(tmp_path.rglob("*upload*"))


def test_nohup_holds_for_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child has it so too
    try:
        server = Server()
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    try:
        assert chat(server.address)["choices"]
    finally:
        assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_nothing_is_lost_when_nobody_reads_what_it_says(number: signal.Signals, expected: int) -> None:
    server = Server(reads_on=False)
    assert server.process.stderr is not None
    server.process.stderr.close()
    replies: list[dict[str, Any]] = []

    def ask() -> None:
        with suppress(urllib.error.URLError, ConnectionError):
            replies.append(chat(server.address, temperature=1.0))

    clients = [threading.Thread(target=ask) for _ in range(24)]
    for client in clients:
        client.start()
    accepted = 0
    while not accepted:
        with urllib.request.urlopen(f"{server.address}/health") as response:
            health = json.load(response)
        accepted = health["running"] + health["waiting"]
    code, _ = server.end(number)
    for client in clients:
        client.join(60)

    assert code == expected
    assert len(replies) >= accepted


def test_nothing_accepted_is_lost_by_sigterm_under_load(server: Server) -> None:
    outcomes: list[str] = []
    begun = threading.Semaphore(0)

    def keep_asking(number: int) -> None:
        while True:
            try:
                reply = chat(server.address, picture=PICTURES[number])
            except urllib.error.HTTPError as error:
                outcomes.append(f"refused {error.code} {error.headers.get('Retry-After') is not None}")
                error.close()
                return
            except (urllib.error.URLError, ConnectionError):
                outcomes.append("not accepted")
                return
            outcomes.append("answered" if reply["choices"][0]["finish_reason"] == "stop" else "cut")
            begun.release()

    clients = [threading.Thread(target=keep_asking, args=(number,)) for number in range(12)]
    for client in clients:
        client.start()
    for _ in range(24):
        assert begun.acquire(timeout=60)
    code, said = server.end(signal.SIGTERM)
    for client in clients:
        client.join(60)

    assert code == 0
    assert "draining" in said
    assert set(outcomes) <= {"answered", "refused 503 True", "not accepted"}
    assert outcomes.count("answered") >= 24
    assert said.count(" 200 ") == outcomes.count("answered")


def test_an_address_that_is_taken_is_told_in_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = subprocess.run(
            [sys.executable, "-m", "llama_adapter", "serve", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    assert ran.returncode == 1
    assert f"port {port}: address already in use" in ran.stderr
    assert "hint: choose another --port" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_model_that_cannot_be_loaded_ends_it_with_the_models_own_error() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "llama_adapter", "serve", "--port", "0", "--model", "no-such-bundle"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 1
    assert "no-such-bundle" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_key_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    keys.chmod(0o600)
    server = Server("--api-key-file", str(keys))
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(server.address)
        assert refused.value.code == 401
        refused.value.close()
        with urllib.request.urlopen(f"{server.address}/health") as response:
            assert response.status == 200
    finally:
        server.end(signal.SIGTERM)
