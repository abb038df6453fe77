"""Clients of other projects with one `llama-adapter serve` and the embedded model, each client in its own environment.

Run by `make clients`. `pytest tests/clients --snapshot-update` writes the results into docs/clients.md.
"""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from llama_adapter.app.models.resources import sample_pictures
from tests.app.serving.http_api.requests import data_uri
from tests.app.serving.online.waiting import wait_for
from tests.app.serving.server_process import ServerProcess
from tests.clients.environments import CLIENTS, NODE, ROOT, Client

PICTURE = sample_pictures() / "01-yellow-moon-green-cross.png"
ANSWERS = {
    item["question"]: item["answer"]
    for line in (sample_pictures() / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    if (item := json.loads(line))["picture"] == PICTURE.name
}
CAPTION, QUESTION = "Generate caption of this image", "What color is the moon?"
ENDS = {match.end() for match in re.finditer(r"\w+", ANSWERS[CAPTION])}  # ends of the caption's tokens
STRUCTURED = {"color": ANSWERS[QUESTION], "has_cross": True, "caption": ANSWERS[CAPTION]}
REFUSALS = {"tools": "This server calls no tools"}
PAGE = ROOT / "docs" / "clients.md"
TABLE = re.compile(r"^\| client \| packages .*?\n(?!\|)", re.MULTILINE | re.DOTALL)
POST = re.compile(r" POST (\S+) ")
RUN_S = 600  # generous, for a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("LLAMA_ADAPTER_API_KEY", raising=False)
        server = ServerProcess()
    with server:
        yield server


@pytest.fixture(scope="module")
def asked(server: ServerProcess) -> Any:
    """Runs a client's program once. Gives its output, and the paths that it requested from the server, in order."""

    @functools.cache
    def ask(client: Client) -> tuple[dict[str, dict[str, Any]], list[str]]:
        before = len(server.lines)
        results = run(client, url=server.url)
        with urllib.request.urlopen(f"{server.url}/v1/models"):  # this request is logged after those of the client
            wait_for(lambda: any(" GET /v1/models " in line for line in server.lines[before:]))
        return results, [match[1] for line in server.lines[before:] if (match := POST.search(line))]

    return ask


def run(client: Client, *, url: str) -> Any:
    assert client.is_installed, "make clients installs it"
    if client.program.endswith(".mjs"):  # node looks for packages in the program's folder
        for name in ("asked.mjs", client.program):
            shutil.copy(ROOT / "tests" / "clients" / name, client.folder)
    given = {
        "url": f"{url}/v1",
        "picture": data_uri(PICTURE.read_bytes(), kind="png"),
        "caption": CAPTION,
        "question": QUESTION,
    }
    environ = {name: value for name, value in os.environ.items() if not re.search("PROXY|^PYTHON|^OPENAI_", name, re.I)}
    ran = subprocess.run(
        client.command, input=json.dumps(given), capture_output=True, text=True, timeout=RUN_S, env=environ
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
def test_client(client: Client, asked: Any) -> None:
    results, paths = asked(client)

    for call, result in results.items():
        assert (result["caption"], result["answer"]) == (ANSWERS[CAPTION], ANSWERS[QUESTION]), call
        assert "".join(filter(None, result["pieces"])) == ANSWERS[CAPTION], call
        assert result.get("structured", STRUCTURED) == STRUCTURED, call
        assert re.fullmatch(r"answered: .*number.*[0-9].*", result["numbers"], re.DOTALL), call
        for name, message in result["refused"].items():
            assert REFUSALS[name] in message, call
    assert paths[0] == next(iter(results.values()))["route"]
    assert set(paths) == {result["route"] for result in results.values()}


def test_the_page_has_the_results(asked: Any, request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [row for client in CLIENTS for row in rows_of(client, asked(client)[0])]
    header = ("client", "packages", "call", "path", "stream", "JSON schema", "refused")
    lines = [header, ("---",) * len(header), *rows]
    expected = TABLE.sub("".join(f"| {' | '.join(line)} |\n" for line in lines), page)

    if request.config.option.update_snapshots:
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected


def rows_of(client: Client, results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The working features, in the words of the table. Only a client's first row has its name."""
    packages = client.packages + (NODE.packages if client.program.endswith(".mjs") else ())
    versions = ", ".join(re.sub("==|(?!^)@(?=[0-9])", " ", package) for package in packages)
    for number, (call, result) in enumerate(results.items()):
        pieces = [piece for piece in result["pieces"] if piece]
        is_by_tokens = ENDS.issuperset(itertools.accumulate(map(len, pieces)))
        stream = "one piece" if len(pieces) == 1 else "tokens" if is_by_tokens else "cut by the client"
        yield (
            *(("", "") if number else (client.name, versions)),
            call,
            f"`{result['route']}`",
            stream,
            "yes" if "structured" in result else "no",
            ", ".join(result["refused"]),
        )
