"""`llama-adapter serve` as a process: it prints its address, answers, and ends on a signal without losing a request."""

import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from llama_adapter.app.models.resources import sample_pictures
from tests import bad_files
from tests.app.serving.http_api.requests import CHAT, chat, data_uri, image, user
from tests.app.serving.online.waiting import wait_for
from tests.app.serving.server_process import READY, ServerProcess

PICTURES = sorted(path for path in sample_pictures().iterdir() if path.suffix == ".png")
KEY = "open-sesame"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_ADAPTER_API_KEY", raising=False)


def captioned(picture: bytes, **parameters: Any) -> dict[str, Any]:
    return chat(user(image(data_uri(picture, kind="png")), "Generate caption of this image"), **parameters)


def ask(address: str, *, picture: Path = PICTURES[0], key: str = KEY, **parameters: Any) -> httpx.Response:
    body, headers = captioned(picture.read_bytes(), **parameters), {"Authorization": f"Bearer {key}"}
    # Without `verify=False`, certificates are read for each request.
    return httpx.post(f"{address}{CHAT}", json=body, headers=headers, timeout=60, trust_env=False, verify=False)


def test_nothing_accepted_is_lost_by_sigterm_under_load_and_nohup_is_respected(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    outcomes: list[str] = []
    begun = threading.Semaphore(0)
    slow = json.dumps(captioned(bad_files.progressive_jpeg(side=1024, num_scans=200_000)))

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
    bodies = [json.dumps(captioned(path.read_bytes(), temperature=0.0)) for path in PICTURES[:8]]

    with ServerProcess() as server:
        alone = [ask(server.url, picture=path, temperature=0.0).json()["choices"] for path in PICTURES[:8]]
        connections = [http.client.HTTPConnection(server.host, server.port, timeout=60) for _ in range(2 * 72)]
        for one in connections:
            one.connect()
        for one, body in zip(connections, itertools.cycle(bodies)):  # 8 slots, 64 may wait
            one.request("POST", CHAT, body, {"Content-Type": "application/json"})
        replies = [one.getresponse() for one in connections]
        contents = [json.load(reply) for reply in replies]
        for one in connections:
            one.close()

    answered = {at: contents[at]["choices"] for at, reply in enumerate(replies) if reply.status == 200}
    refused = {at: reply for at, reply in enumerate(replies) if reply.status != 200}
    reasons = {(reply.status, contents[at]["error"]["code"]) for at, reply in refused.items()}
    assert reasons <= {(429, "busy"), (503, "unavailable")}
    assert 64 <= len(answered) < len(replies)
    assert all(choices == alone[at % 8] for at, choices in answered.items())
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused.values())


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
