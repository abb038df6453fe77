"""`llama-adapter serve` as a process: it prints its address, answers, and ends on a signal without losing a request."""

import asyncio
import http.client
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from llama_adapter.app.models.resources import sample_pictures
from scripts.service_bench.client import CHAT, Connection, Reply, ask_once
from scripts.service_bench.load import TIMEOUT_S, shown_outcome
from scripts.service_bench.process import READY, ServerProcess
from scripts.service_bench.questions import Question, captions
from tests import bad_files
from tests.app.serving.http_api.requests import chat, data_uri, image, user
from tests.app.serving.online.waiting import wait_for

PICTURES = sorted(path for path in sample_pictures().iterdir() if path.suffix == ".png")
KEY = "open-sesame"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_ADAPTER_API_KEY", raising=False)


def ask(address: str, *, picture: Path = PICTURES[0], key: str = KEY, **parameters: Any) -> httpx.Response:
    about = user(image(data_uri(picture.read_bytes(), kind="png")), "Generate caption of this image")
    body, headers = chat(about, **parameters), {"Authorization": f"Bearer {key}"}
    # Without `verify=False`, certificates are read for each request.
    return httpx.post(f"{address}{CHAT}", json=body, headers=headers, timeout=60, trust_env=False, verify=False)


def test_nothing_accepted_is_lost_by_sigterm_under_load_and_nohup_is_respected(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    outcomes: list[str] = []
    begun = threading.Semaphore(0)
    picture = bad_files.progressive_jpeg(side=1024, num_scans=200_000)
    slow = Question(name="slow", picture=picture, prompt="What is this?").body(stream=False)

    def keep_asking(number: int) -> None:
        while True:
            try:
                reply = ask(server.url, picture=PICTURES[number])
            except httpx.TransportError:
                outcomes.append("not accepted")
                return
            if reply.status_code != 200:
                outcomes.append(f"refused {reply.status_code} {'Retry-After' in reply.headers}")
                return
            outcomes.append("answered" if reply.json()["choices"][0]["finish_reason"] == "stop" else "cut")
            begun.release()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server inherits this
    try:
        server = ServerProcess("--api-key-file", str(keys))
    finally:
        signal.signal(signal.SIGHUP, before)
    with server:
        os.kill(server.pid, signal.SIGHUP)
        refused = ask(server.url, key="another-key")
        clients = [threading.Thread(target=keep_asking, args=(number,)) for number in range(12)]
        for client in clients:
            client.start()
        for _ in range(24):
            assert begun.acquire(timeout=60)
        impatient = http.client.HTTPConnection(server.host, server.port)
        impatient.request("POST", CHAT, slow, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
        wait_for(lambda: httpx.get(f"{server.url}/health", trust_env=False, verify=False).json()["slow_reading"])
        threading.Timer(0.5, impatient.close).start()  # while the server drains
        server.terminate()
        code, said = server.wait(timeout_s=60), "\n".join(server.lines)
        for client in clients:
            client.join(60)

    assert refused.status_code == 401
    assert code == 0
    assert "draining" in said
    assert re.search(r"POST /v1/chat/completions 499 .*error cancelled", said)  # the impatient one
    assert set(outcomes) <= {"answered", "refused 503 True", "not accepted"}
    assert outcomes.count("answered") >= 24
    assert len(re.findall(r"POST /v1/chat/completions 200 \d+ ms", said)) == outcomes.count("answered")
    assert not [secret for secret in ("moon", "base64", KEY) if secret in said]


def test_of_twice_as_many_requests_as_fit_each_is_answered_or_refused_with_a_time_to_ask_again() -> None:
    questions = captions()[:8]

    async def ask_at_once(server: ServerProcess) -> tuple[list[Reply], list[Reply]]:
        bodies = [question.body(stream=False) for question in questions]
        alone = [await ask_once(server.host, server.port, body, timeout_s=TIMEOUT_S) for body in bodies]
        connections = [await Connection.open(server.host, server.port) for _ in range(2 * 72)]  # 8 slots, 64 may wait
        asked = (one.ask(body, timeout_s=TIMEOUT_S) for one, body in zip(connections, itertools.cycle(bodies)))
        replies = await asyncio.gather(*asked)
        await asyncio.gather(*(one.close() for one in connections))
        return alone, replies

    with ServerProcess() as server:
        alone, replies = asyncio.run(ask_at_once(server))

    outcomes = Counter(map(shown_outcome, replies))
    assert outcomes.keys() <= {"answered", "refused 429 busy", "refused 503 unavailable"}
    assert 64 <= outcomes["answered"] < len(replies)
    assert all(reply.text == alone[at % 8].text for at, reply in enumerate(replies) if reply.outcome == "answered")
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply.outcome == "refused")


def test_no_request_is_lost_by_ctrl_c_if_stderr_is_closed() -> None:
    command = [sys.executable, "-m", "llama_adapter", "serve", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    address = next(line for line in server.stderr if line.startswith(READY)).removeprefix(READY).strip()
    server.stderr.close()
    replies: list[httpx.Response] = []

    def ask_once() -> None:
        with suppress(httpx.HTTPError):
            replies.append(ask(address, temperature=1.0).raise_for_status())

    clients = [threading.Thread(target=ask_once) for _ in range(24)]
    for client in clients:
        client.start()
    accepted = 0
    while not accepted:
        health = httpx.get(f"{address}/health", trust_env=False, verify=False).json()
        accepted = health["running"] + health["waiting"]
    server.send_signal(signal.SIGINT)
    code = server.wait(60)
    for client in clients:
        client.join(60)

    assert code == 130
    assert len(replies) >= accepted
