"""`llama-adapter serve` as a process: it prints its address, answers, and ends on a signal without losing a request."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.models.resources import sample_pictures
from scripts.service_bench.process import READY, ServerProcess
from tests.app.models.parallel.processes import ranks_of
from tests.app.serving.http_api.requests import chat, data_uri, image, user

PICTURES = sorted(path for path in sample_pictures().iterdir() if path.suffix == ".png")
KEY = "open-sesame"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_ADAPTER_API_KEY", raising=False)


def ask(address: str, *, picture: Path = PICTURES[0], key: str = KEY, **parameters: Any) -> dict[str, Any]:
    about = user(image(data_uri(picture.read_bytes(), kind="png")), "Generate caption of this image")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = json.dumps(chat(about, **parameters)).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        reply: dict[str, Any] = json.load(response)
        return reply


def address_of(server: ServerProcess) -> str:
    return f"http://{server.host}:{server.port}"


def ended(server: ServerProcess, number: signal.Signals) -> tuple[int, str]:
    """Send a signal; returns the exit code, and everything on stderr."""
    os.kill(server.pid, number)
    return server.wait(timeout_s=60), "\n".join(server.lines)


def test_nothing_accepted_is_lost_by_sigterm_under_load(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    outcomes: list[str] = []
    begun = threading.Semaphore(0)

    def keep_asking(number: int) -> None:
        while True:
            try:
                reply = ask(address_of(server), picture=PICTURES[number])
            except urllib.error.HTTPError as error:
                outcomes.append(f"refused {error.code} {error.headers.get('Retry-After') is not None}")
                error.close()
                return
            except (urllib.error.URLError, ConnectionError):
                outcomes.append("not accepted")
                return
            outcomes.append("answered" if reply["choices"][0]["finish_reason"] == "stop" else "cut")
            begun.release()

    with ServerProcess("--api-key-file", str(keys)) as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(address_of(server), key="another-key")
        refused.value.close()
        clients = [threading.Thread(target=keep_asking, args=(number,)) for number in range(12)]
        for client in clients:
            client.start()
        for _ in range(24):
            assert begun.acquire(timeout=60)
        code, said = ended(server, signal.SIGTERM)
        for client in clients:
            client.join(60)

    assert refused.value.code == 401
    assert code == 0
    assert "draining" in said
    assert set(outcomes) <= {"answered", "refused 503 True", "not accepted"}
    assert outcomes.count("answered") >= 24
    assert len(re.findall(r"POST /v1/chat/completions 200 \d+ ms", said)) == outcomes.count("answered")
    assert not [secret for secret in ("moon", "base64", KEY) if secret in said]


def test_sighup_drains_and_removes_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with ServerProcess(command=("-m", "llama_adapter", "web")) as server:
        code, said = ended(server, signal.SIGHUP)

    assert code == 0
    assert "draining" in said
    assert not any(tmp_path.rglob("*upload*"))


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server inherits this
    try:
        server = ServerProcess()
    finally:
        signal.signal(signal.SIGHUP, before)
    with server:
        os.kill(server.pid, signal.SIGHUP)
        assert ask(address_of(server))["choices"]
        assert ended(server, signal.SIGTERM)[0] == 0


def test_no_request_is_lost_by_ctrl_c_if_stderr_is_closed() -> None:
    command = [sys.executable, "-m", "llama_adapter", "serve", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    address = next(line for line in server.stderr if line.startswith(READY)).removeprefix(READY).strip()
    server.stderr.close()
    replies: list[dict[str, Any]] = []

    def ask_once() -> None:
        with suppress(urllib.error.URLError, ConnectionError):
            replies.append(ask(address, temperature=1.0))

    clients = [threading.Thread(target=ask_once) for _ in range(24)]
    for client in clients:
        client.start()
    accepted = 0
    while not accepted:
        with urllib.request.urlopen(f"{address}/health") as response:
            health = json.load(response)
        accepted = health["running"] + health["waiting"]
    server.send_signal(signal.SIGINT)
    code = server.wait(60)
    for client in clients:
        client.join(60)

    assert code == 130
    assert len(replies) >= accepted


def test_a_service_whose_rank_is_killed_loads_its_model_again() -> None:
    with ServerProcess("--tensor-parallel", "2") as server:
        before = ask(address_of(server))["choices"]
        [rank] = ranks_of(server.pid)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(urllib.error.HTTPError) as failed:
            ask(address_of(server))
        failed.value.close()
        after, refused = None, set()
        while after is None:
            try:
                after = ask(address_of(server))["choices"]
            except urllib.error.HTTPError as error:  # the model is being loaded
                refused.add(error.code)
                error.close()
                time.sleep(0.2)
        [other] = ranks_of(server.pid)
        code, said = ended(server, signal.SIGTERM)

    assert failed.value.code == 503
    assert refused <= {503}
    assert after == before
    assert f"Rank 1 of 2 (process {rank}) failed: ended by SIGKILL" in said
    assert code == 0
    assert not Path(f"/proc/{other}").exists()
