"""`llama-adapter serve --engine ray` with two replicas on a cluster of its own: where pictures go, and what is lost.

That its answers are those of one process is in test_openai_client.py.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from scripts.service_bench.client import Connection, Reply
from scripts.service_bench.load import shown_outcome
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import Question, captions
from scripts.service_bench.replicas import flags_of, replicas_of, wait_for_replicas
from tests.app.online.waiting import wait_for

pytestmark = pytest.mark.slow

REPLICAS = flags_of(2)
SAMPLE = re.compile(r"^(llama_adapter_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("LLAMA_ADAPTER_API_KEY", raising=False)
        environ.setenv("OMP_NUM_THREADS", "1")
        server = ServerProcess(*REPLICAS)
    before = descendants(server.pid)
    try:
        yield server
    finally:
        server.kill()
        for pid in before:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        with suppress(OSError):
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, children.read_text(encoding="ascii").split())
    return found[1:]


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def metric(server: ServerProcess, name: str, **labels: str) -> Counter[str]:
    """The values of a metric, by replica."""
    with urllib.request.urlopen(f"http://{server.host}:{server.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = Counter[str]()
    for match in SAMPLE.finditer(text):
        given = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        if match[1] == name and labels.items() <= given.items():
            found[given["replica"]] += float(match[3])  # type: ignore[assignment]
    return found


async def ask_all(server: ServerProcess, questions: list[Question], *, clients: int) -> list[tuple[str, Reply]]:
    """Every question once, every other one as a stream, by so many clients at once; replies by picture."""
    left, replies = list(enumerate(questions)), []

    async def ask() -> None:
        connection = await Connection.open(server.host, server.port)
        while left:
            index, question = left.pop(0)
            reply = await connection.ask(question.body(stream=index % 2 == 0), timeout_s=TIMEOUT_S)
            replies.append((question.name, reply))
            if not connection.is_open:
                connection = await Connection.open(server.host, server.port)
        await connection.close()

    await asyncio.gather(*(ask() for _ in range(clients)))
    return replies


@pytest.mark.proves("serve: replicas", "CPU")
def test_a_picture_stays_with_its_replica(server: ServerProcess) -> None:
    pictures = captions()

    replies = asyncio.run(ask_all(server, pictures * 3, clients=4))

    assert {reply.outcome for _, reply in replies} == {"answered"}
    name = "llama_adapter_replica_pictures_total"
    encoded, reused = (metric(server, name, outcome=outcome) for outcome in ("encoded", "reused"))
    assert encoded.total() == len(pictures), "each picture is encoded by one replica alone"
    assert reused.total() == 2 * len(pictures)
    assert set(encoded) == set(replicas_of(server))
    assert min(encoded.values()) > 0, "both replicas have pictures"


@pytest.mark.proves("serve: replicas", "CPU")
def test_a_killed_replica_costs_the_requests_that_it_had_and_is_replaced(server: ServerProcess) -> None:
    pictures = captions()
    expected = {name: reply.text for name, reply in asyncio.run(ask_all(server, pictures, clients=2))}
    before = replicas_of(server)

    async def kill_in_between() -> list[tuple[str, Reply]]:
        asking = asyncio.create_task(ask_all(server, pictures * 20, clients=8))
        await asyncio.sleep(0.5)
        os.kill(next(iter(before.values())), signal.SIGKILL)
        return await asking

    replies = asyncio.run(kill_in_between())

    outcomes = Counter(shown_outcome(reply) for _, reply in replies)
    assert outcomes.total() == 20 * len(pictures)
    assert set(outcomes) <= {"answered", "refused 200 replica_lost", "refused 503 replica_lost"}, outcomes
    # At most what one replica had at once: of 8 clients. What had sent nothing was asked again.
    assert outcomes.total() - outcomes["answered"] <= 8
    assert all(reply.text == expected[name] for name, reply in replies if reply.outcome == "answered")
    wait_for_replicas(server, 3)
    replies = asyncio.run(ask_all(server, pictures, clients=4))
    assert {reply.outcome for _, reply in replies} == {"answered"}
    assert len(metric(server, "llama_adapter_replica_uptime_seconds")) == 2


def test_sigterm_answers_what_is_accepted_and_leaves_no_process(server: ServerProcess) -> None:
    started = descendants(server.pid)
    assert len(started) > 4, "the processes of the cluster"

    async def end() -> list[tuple[str, Reply]]:
        asking = asyncio.create_task(ask_all(server, captions(), clients=8))
        await asyncio.sleep(0.2)
        server.terminate()
        return await asking

    with suppress(OSError):  # a new connection after the end
        replies = asyncio.run(end())
        assert {shown_outcome(reply) for _, reply in replies} <= {
            "answered",
            "refused 503 unavailable",
            "not_accepted",
        }

    assert server.wait(timeout_s=TIMEOUT_S) == 0
    wait_for(lambda: not any(is_alive(pid) for pid in started))
    assert not any("Traceback" in line for line in server.lines)


def test_a_model_that_does_not_load_is_told_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llama_adapter", "serve", "--port", "0", *REPLICAS, "--model", "no-such-bundle"]

    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert ran.returncode == 1, ran.stderr
    assert "no-such-bundle" in ran.stderr
    assert ran.stderr.count("error:") == 1
    assert "Traceback" not in ran.stderr
