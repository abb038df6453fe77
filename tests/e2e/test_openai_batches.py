"""OpenAI's client with files and batches, and a `llama-adapter serve` process that is killed in the middle."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from scripts.service_bench.process import ServerProcess
from tests.app.serving.http_api.requests import RED_STAR, chat, data_uri, image, user

pytestmark = pytest.mark.slow

NUM_ROWS = 150


def row(number: int, question: str) -> str:
    body = chat(user(image(data_uri(RED_STAR.read_bytes())), question))
    return json.dumps({"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def wait_for(client: openai.OpenAI, batch_id: str, is_there: Callable[[Any], bool]) -> Any:
    until = time.monotonic() + 60
    while not is_there(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < until, batch
        time.sleep(0.01)
    return batch


@pytest.mark.proves("serve: batch files", "CPU")
def test_a_batch_survives_a_killed_server(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    flags = ("--batch-folder", str(folder), "--batch-size", "2")
    rows = [row(number, "What color is the star?") for number in range(NUM_ROWS)]
    content = "\n".join([*rows[:1], "no JSON", *rows[1:]]).encode()

    with ServerProcess(*flags) as server, client_of(server) as client:
        file = client.files.create(file=("rows.jsonl", content), purpose="batch")
        assert client.files.content(file.id).content == content
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"name": "stars"},
        )
        wait_for(client, batch.id, lambda batch: batch.request_counts.completed >= 3)
        os.kill(server.pid, signal.SIGKILL)
        server.wait(timeout_s=60)
    (records,) = (folder / "batches").glob("*.jsonl")
    answered = {json.loads(line)["id"] for line in records.read_bytes().split(b"\n")[:-1]}
    assert 3 <= len(answered) <= NUM_ROWS

    with ServerProcess(*flags) as server, client_of(server) as client:
        done = wait_for(client, batch.id, lambda batch: batch.status == "completed")
        output = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        (error,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
        listed = [one.id for one in client.batches.list()]
        files = {one.id for one in client.files.list()}
        deleted = client.files.delete(file.id)

    assert [line["custom_id"] for line in output] == [f"row-{number}" for number in range(NUM_ROWS)]
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in output} == {"red"}
    assert answered <= {line["id"] for line in [*output, error]}  # not computed a second time
    assert (error["custom_id"], error["error"]["code"]) == (None, "invalid_json_line")
    assert (done.request_counts.total, done.request_counts.failed) == (NUM_ROWS + 1, 1)
    assert (done.metadata, listed) == ({"name": "stars"}, [batch.id])
    assert files == {file.id, done.output_file_id, done.error_file_id}
    assert deleted.deleted
