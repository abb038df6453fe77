"""`llama-adapter serve --engine ray`: two replicas, where pictures go, and what is lost; replicas of two ranks.

One server starts a cluster, and the others join it, because starting Ray's processes takes most of the time.
Some tests end it or a replica. So each test gets a server with two living replicas, whatever ran before it.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from llama_adapter import Captioner
from llama_adapter.app.models.resources import sample_pictures
from tests.app.models.parallel.processes import descendants, listening, ranks_of
from tests.app.serving.http_api.requests import CHAT, chat, data_uri, image, user
from tests.app.serving.online.waiting import wait_for
from tests.app.serving.server_process import ServerProcess
from tests.e2e import test_openai_client as openai_client

pytestmark = pytest.mark.slow

SAMPLE = re.compile(r"^(llama_adapter_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
CLUSTER = re.compile(rb"--gcs-address=([\d.]+:\d+)")
TIMEOUT_S = 60.0
READY = re.compile(r"replica (\S+) is ready: process (\d+) on ")
READY_S = 180.0  # time limit for a replica to load the model
SHORT = "How many objects are there?"
PICTURES = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))


@dataclass(frozen=True, slots=True)
class Question:
    name: str  # of the picture
    picture: bytes
    prompt: str = "Generate caption of this image"


class Reply(NamedTuple):
    """`text` is empty unless the outcome is "answered"."""

    outcome: str  # or "refused STATUS CODE", "not_accepted", "broken" after its first byte, "hung"
    text: str = ""


def captions() -> list[Question]:
    return [Question(path.name, path.read_bytes()) for path in PICTURES]


@pytest.fixture(scope="module", autouse=True)
def environ() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("LLAMA_ADAPTER_API_KEY", raising=False)
        environ.setenv("OMP_NUM_THREADS", "1")
        environ.setenv("RAY_worker_niceness", "0")  # else replicas yield to all other processes
        environ.setenv("RAY_AUTH_MODE", "token")
        environ.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else only its creator can join a cluster
        yield


@contextmanager
def started(*flags: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*flags)
    before = descendants(server.pid)
    try:
        yield server
    finally:
        server.kill()
        for pid in before:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def running(environ: None) -> Iterator[tuple[ExitStack, list[ServerProcess]]]:
    """What ends the server, and the server, once it has been started."""
    with ExitStack() as stack:
        yield stack, []


@pytest.fixture
def server(running: tuple[ExitStack, list[ServerProcess]]) -> ServerProcess:
    """A server of two replicas. Its cluster ends with it, and so does a server that has joined it.

    It reserves the resources of four replicas. So the cluster has room for the other servers on any machine.
    """
    stack, servers = running
    if not servers or servers[-1].has_ended():
        stack.close()
        number = ("--replicas", "2", "--max-replicas", "4", "--max-waiting", "200")
        servers.append(stack.enter_context(started("--engine", "ray", "--ray-address", "local", *number)))
    wait_until_two(servers[-1])
    return servers[-1]


def ever_ready(server: ServerProcess) -> dict[str, int]:
    """The processes of all replicas that have been ready so far, by name. Some may have ended."""
    return {match[1]: int(match[2]) for line in list(server.lines) if (match := READY.search(line))}


def replicas_of(server: ServerProcess) -> dict[str, int]:
    """The processes of the replicas that have been ready and have not ended, by name."""
    return {name: pid for name, pid in ever_ready(server).items() if is_alive(pid)}


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for_replicas(server: ServerProcess, number: int) -> None:
    """Wait until `number` replicas have been ready, including those that have ended. Raises TimeoutError."""
    deadline = time.monotonic() + READY_S
    while len(ever_ready(server)) < number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{number} replicas are not ready after {READY_S:g} s")
        time.sleep(0.02)


def cluster_of(server: ServerProcess) -> str:
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(server.pid) if is_alive(pid)]
    return next(match[1].decode() for command in commands if (match := CLUSTER.search(command)))


def wait_until_two(server: ServerProcess) -> None:
    """Wait until exactly two replicas are alive, and the server counts no other ones."""

    def is_ready() -> bool:
        living = set(replicas_of(server))
        return len(living) == 2 and set(metric(server, "llama_adapter_replica_uptime_seconds")) == living

    deadline = time.monotonic() + READY_S
    while not is_ready():
        assert time.monotonic() < deadline, f"there are not two replicas: {list(replicas_of(server))}"
        time.sleep(0.1)


@pytest.fixture
def cluster(server: ServerProcess) -> str:
    return cluster_of(server)


# OpenAI's client: questions whose answers take a different path than in one process.

captioner = openai_client.captioner  # a fixture


def texts_of(captioner: Captioner, questions: list[Question]) -> dict[str, str]:
    paths = [sample_pictures() / question.name for question in questions]
    answers = captioner.generate(paths, [question.prompt for question in questions])
    return {question.name: answer.text for question, answer in zip(questions, answers, strict=True)}


@pytest.fixture
def url(server: ServerProcess) -> str:
    return f"{server.url}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai_client.client_of(url) as client:
        yield client


test_streams = openai_client.test_a_stream_gives_the_same_text_piece_by_piece
test_json = openai_client.test_json_of_a_model_is_parsed_by_both_routes
test_log_probabilities = openai_client.test_several_answers_with_log_probabilities
test_errors = openai_client.test_errors_are_those_that_the_client_knows


def metric(server: ServerProcess, name: str, **labels: str) -> Counter[str]:
    found = Counter[str]()
    for match in SAMPLE.finditer(httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False, verify=False).text):
        given = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        if match[1] == name and labels.items() <= given.items():
            found[given["replica"]] += float(match[3])  # type: ignore[assignment]
    return found


def counts(server: ServerProcess) -> list[Counter[str]]:
    """How many pictures were encoded and how many encodings were reused since the start, by replica."""
    return [
        metric(server, "llama_adapter_replica_pictures_total", outcome=outcome) for outcome in ("encoded", "reused")
    ]


async def ask_all(
    server: ServerProcess, questions: Iterable[Question], *, clients: int, act: Callable[[], object] | None = None
) -> list[tuple[str, Reply]]:
    """Ask every question once, every second one as a stream, from `clients` clients at once. Returns the replies.

    A question whose connection is refused has the outcome "not_accepted". `act` is called once, as soon as the number
    of replies equals the number of clients, while other questions are in progress.
    """
    left, replies = enumerate(questions), list[tuple[str, Reply]]()

    async def ask(client: httpx.AsyncClient) -> None:
        for index, question in left:
            replies.append((question.name, await reply_to(client, question, stream=index % 2 == 0)))
            if act is not None and len(replies) == clients:
                act()

    async with httpx.AsyncClient(base_url=server.url, timeout=None, trust_env=False, verify=False) as client:
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    return replies


async def reply_to(client: httpx.AsyncClient, question: Question, *, stream: bool) -> Reply:
    about = user(image(data_uri(question.picture)), question.prompt)
    status, content = 0, b""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            async with client.stream("POST", CHAT, json=chat(about, temperature=0.0, stream=stream)) as response:
                status, content = response.status_code, await response.aread()
    except TimeoutError:
        return Reply("hung")
    except httpx.TransportError:
        return Reply("broken" if status else "not_accepted")
    return outcome_of(status, content.decode(), is_stream=stream and status == 200)


def outcome_of(status: int, content: str, *, is_stream: bool) -> Reply:
    """What a whole reply says. A stream that ends neither with an error nor with `[DONE]` is "broken"."""
    events = [event.removeprefix("data: ") for event in content.split("\n\n") if event] if is_stream else [content]
    is_done = not is_stream or events[-1:] == ["[DONE]"]
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    for one in parsed:
        if "error" in one:
            return Reply(f"refused {status} {one['error']['code']}")
    choices = [choice for one in parsed for choice in one["choices"]]
    text = "".join(choice["delta" if is_stream else "message"].get("content") or "" for choice in choices)
    return Reply("answered", text) if is_done else Reply("broken")


def test_outcomes_of_replies_and_of_streams() -> None:
    whole, refusal = '{"choices": [{"message": {"content": "a star"}}]}', '{"error": {"code": "busy"}}'
    piece, lost = 'data: {"choices": [{"delta": {"content": "a "}}]}\n\n', 'data: {"error": {"code": "lost"}}\n\n'

    assert outcome_of(200, whole, is_stream=False) == Reply("answered", "a star")
    assert outcome_of(429, refusal, is_stream=False) == Reply("refused 429 busy")
    assert outcome_of(200, piece * 2 + "data: [DONE]\n\n", is_stream=True) == Reply("answered", "a a ")
    assert outcome_of(200, piece + lost, is_stream=True) == Reply("refused 200 lost")
    assert outcome_of(200, piece, is_stream=True) == outcome_of(200, "", is_stream=True) == Reply("broken")


def assert_all_have_answered(server: ServerProcess) -> None:
    """Every living replica has encoded pictures."""
    answered = counts(server)[0]
    assert all(answered[name] > 0 for name in replicas_of(server)), answered


def ask_while(
    server: ServerProcess, questions: Iterable[Question], act: Callable[[], object]
) -> list[tuple[str, Reply]]:
    """Ask the questions with 8 clients, and call `act` while they are in progress."""
    return asyncio.run(ask_all(server, questions, clients=8, act=act))


def until_ready(server: ServerProcess, number: int, questions: list[Question]) -> Iterator[Question]:
    """The questions, repeated until `number` replicas have been ready (or for `READY_S`), and then once more.

    They are repeated slowly, since they would take the processors from the replica that loads.
    """
    deadline = time.monotonic() + READY_S
    for place, question in enumerate(itertools.cycle(questions)):
        if len(ever_ready(server)) >= number or time.monotonic() > deadline:
            break
        if place >= len(questions):
            time.sleep(0.1)
        yield question
    yield from questions


@pytest.mark.proves("serve: replicas", "CPU")
def test_a_picture_stays_with_its_replica(server: ServerProcess) -> None:
    # The files must differ from those of the tests above.
    pictures = [dataclasses.replace(question, picture=question.picture + b"sticky") for question in captions()]
    before = counts(server)
    replies = asyncio.run(ask_all(server, pictures * 3, clients=4))

    assert {reply.outcome for _, reply in replies} == {"answered"}
    encoded, reused = (now - then for now, then in zip(counts(server), before, strict=True))
    assert encoded.total() == len(pictures), "each picture is encoded by one replica alone"
    assert reused.total() == 2 * len(pictures)
    assert set(encoded) == set(replicas_of(server))
    assert min(encoded.values()) > 0, "both replicas have pictures"


def test_replicas_that_are_too_large_for_one_machine_together_are_refused_before_they_load(cluster: str) -> None:
    flags = ("--engine", "ray", "--ray-address", cluster, "--max-replicas", "2", "--batch-size", "1000000")
    command = [sys.executable, "-m", "llama_adapter", "serve", "--port", "0", *flags]

    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert ran.returncode == 2, ran.stderr
    assert "GB are free on cpu for each of 2 replicas on this machine" in ran.stderr
    assert "fewer replicas by --replicas or --max-replicas" in ran.stderr
    assert ran.stderr.count("error:") == 1
    assert "Traceback" not in ran.stderr


def test_all_ports_are_on_loopback(server: ServerProcess) -> None:
    places = {pid: listening(pid) for pid in (server.pid, *descendants(server.pid))}

    assert {address for found in places.values() for address, _ in found} == {"127.0.0.1"}
    assert all(places[pid] for pid in replicas_of(server).values())


def lose_a_replica(
    server: ServerProcess, process: int, questions: list[Question], texts: dict[str, str], codes: tuple[str, ...]
) -> None:
    """Kill a process while questions are asked. Only requests on one replica may fail, and it is replaced."""
    num_ready = len(ever_ready(server))

    asked = until_ready(server, num_ready + 1, questions)
    replies = ask_while(server, asked, lambda: os.kill(process, signal.SIGKILL))

    outcomes = Counter(reply.outcome for _, reply in replies)
    failures = {f"refused {status} {code}" for status in (200, 503) for code in codes}
    assert set(outcomes) <= {"answered", *failures}, outcomes
    # Only requests on one replica can fail, at most 8. Requests that had sent nothing yet were repeated.
    assert outcomes.total() - outcomes["answered"] <= 8, outcomes
    assert all(reply.text == texts[name] for name, reply in replies if reply.outcome == "answered")
    wait_for_replicas(server, num_ready + 1)
    assert_all_have_answered(server)
    replies = asyncio.run(ask_all(server, questions[:8], clients=4))
    assert {reply.outcome for _, reply in replies} == {"answered"}
    assert all(reply.text == texts[name] for name, reply in replies)
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.proves("serve: replicas", "CPU")
def test_of_replicas_of_two_ranks_one_ends_with_its_rank_and_all_with_their_server(
    cluster: str, captioner: Captioner
) -> None:
    # Mostly short answers: two ranks of two replicas compute long on two cores.
    questions = [
        question if number % 8 < 2 else dataclasses.replace(question, prompt=SHORT)
        for number, question in enumerate(captions())
    ]
    number = ("--replicas", "2", "--max-replicas", "4", "--tensor-parallel", "2")
    with started("--engine", "ray", "--ray-address", cluster, *number) as split:
        wait_until_two(split)
        lost, kept = list(replicas_of(split).values())
        (rank,), ranks_kept = ranks_of(lost), ranks_of(kept)
        assert len(ranks_kept) == 1
        if len(os.sched_getaffinity(0)) > 1:
            assert not os.sched_getaffinity(kept) & os.sched_getaffinity(*ranks_kept)

        lose_a_replica(split, rank, questions, texts_of(captioner, questions), ("unavailable", "replica_lost"))

        assert not is_alive(lost)
        assert (is_alive(kept), ranks_of(kept)) == (True, ranks_kept)
        replicas = list(replicas_of(split).values())
        ranks = [rank for replica in replicas for rank in ranks_of(replica)]
        assert (len(replicas), len(ranks)) == (2, 2)
        split.terminate()
        assert split.wait(timeout_s=TIMEOUT_S) == 0
        wait_for(lambda: not any(is_alive(pid) for pid in (*replicas, *ranks)))


@pytest.mark.proves("serve: replicas", "CPU")
def test_a_killed_replica_costs_the_requests_that_it_had_and_is_replaced(
    server: ServerProcess, captioner: Captioner
) -> None:
    first, *_ = replicas_of(server).values()
    lose_a_replica(server, first, captions(), texts_of(captioner, captions()), ("replica_lost",))
    assert len(metric(server, "llama_adapter_replica_uptime_seconds")) == 2


def test_sigterm_answers_what_is_accepted_and_leaves_no_process(server: ServerProcess) -> None:
    started = descendants(server.pid)
    assert len(started) > 4, "the processes of the cluster"

    replies = ask_while(server, captions() * 20, server.terminate)

    outcomes = Counter(reply.outcome for _, reply in replies)
    assert set(outcomes) <= {"answered", "refused 503 unavailable", "not_accepted"}, outcomes
    assert outcomes["answered"] >= 8, "what was accepted before the signal"
    assert server.wait(timeout_s=TIMEOUT_S) == 0
    wait_for(lambda: not any(is_alive(pid) for pid in started))
    assert not any("Traceback" in line for line in server.lines)
