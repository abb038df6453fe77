"""Files and batches: uploads stay within limits, and each row is answered once, also after crashes and restarts."""

import asyncio
import errno
import io
import json
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from llama_adapter.app.serving.http_api import batches as batches_module
from llama_adapter.app.serving.http_api import file_store, uploads
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api, open_batches
from llama_adapter.app.serving.http_api.batches import Batches
from llama_adapter.app.serving.http_api.file_store import FileLimits
from llama_adapter.app.serving.http_api.guards import GuardSettings
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.online.types import BusyError
from llama_adapter.runtime.errors import UsageError
from tests.app.serving.http_api.asgi import Client
from tests.app.serving.http_api.live import StubService, answer, error, failed, served
from tests.app.serving.http_api.requests import CHAT, chat
from tests.app.serving.online.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow


class Counting(StubService):
    """Answers each request with the number of requests received so far."""

    def __init__(self) -> None:
        super().__init__(lambda handle: handle.deliver(answer(f"answer {len(self.asks)}")))


@contextmanager
def opened(folder: Path, service: StubService, *, keys: tuple[str, ...] = (), **limits: int) -> Iterator[httpx.Client]:
    settings = ApiSettings(guards=GuardSettings(api_keys=keys))
    with open_batches(str(folder), service, settings=settings, limits=FileLimits(**limits)) as batches:  # type: ignore[arg-type]
        api = create_api(service, settings=settings, batches=batches)  # type: ignore[arg-type]
        with served(api) as url, httpx.Client(base_url=url, trust_env=False, timeout=WAIT_S, verify=False) as client:
            client.app, client.batches = api, batches  # type: ignore[attr-defined]
            yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def service() -> Counting:
    return Counting()


@pytest.fixture
def client(folder: Path, service: Counting) -> Iterator[httpx.Client]:
    with opened(folder, service) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """For requests that are refused and leave nothing."""
    with opened(tmp_path_factory.mktemp("refusing") / "kept", Counting()) as client:
        yield client


def row(custom_id: str, body: Any = None, *, url: str = CHAT, **fields: Any) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": url, "body": chat() if body is None else body, **fields}
    )


def upload(client: httpx.Client, *lines: str, name: str = "rows.jsonl", **options: Any) -> httpx.Response:
    content = "".join(f"{line}\n" for line in lines).encode()
    return client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "batch"}, **options)


def created(client: httpx.Client, *lines: str, endpoint: str = CHAT) -> httpx.Response:
    wanted = {"input_file_id": upload(client, *lines).json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    return client.post("/v1/batches", json=wanted)


def begin(client: httpx.Client, *lines: str, endpoint: str = CHAT) -> str:
    batch = created(client, *lines, endpoint=endpoint)
    assert batch.status_code == 200, batch.text
    return str(batch.json()["id"])


def ended(client: httpx.Client, batch_id: str, status: str = "completed") -> dict[str, Any]:
    until = time.monotonic() + WAIT_S
    while (batch := client.get(f"/v1/batches/{batch_id}").json())["status"] != status:
        assert time.monotonic() < until, batch
        time.sleep(0.01)
    return dict(batch)


def lines_of(client: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.get(f"/v1/files/{file_id}/content").text.splitlines()]


def test_rows_are_answered_as_requests_and_written_in_their_order(client: httpx.Client, service: Counting) -> None:
    batch = ended(client, begin(client, row("b"), "", row("a"), row("c")))

    lines = lines_of(client, batch["output_file_id"])
    assert [line["custom_id"] for line in lines] == ["b", "a", "c"]
    assert {(line["response"]["status_code"], line["error"]) for line in lines} == {(200, None)}
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    assert sorted(texts) == ["answer 0", "answer 1", "answer 2"]
    assert (batch["error_file_id"], batch["errors"]) == (None, None)
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert all(ask.is_background for ask in service.asks)
    assert list(client.batches._folder.glob("*.jsonl")) == []  # type: ignore[attr-defined]


def test_bad_rows_go_to_the_error_file(client: httpx.Client) -> None:
    bad_rows = [
        ("{", None, "invalid_json_line"),
        ("[]", None, "invalid_json_line"),
        ("[" * 60_000, None, "request_too_complex"),
        ("x" * 200_000, None, "line_too_long"),
        (json.dumps({"method": "POST", "url": CHAT, "body": chat()}), None, "invalid_custom_id"),
        (row("x" * 513), None, "invalid_custom_id"),
        (row("good"), "good", "duplicate_custom_id"),
        (row("b", method="GET"), "b", "invalid_method"),
        (row("c", url="/v1/embeddings"), "c", "invalid_url"),
        (row("d", more=1), "d", "unknown_parameter"),
    ]
    refused_rows = [
        (row("e", []), (400, "invalid_type")),
        (row("f", {"model": "default"}), (400, "missing_required_parameter")),
        (row("g", {**chat(), "model": "other"}), (404, "model_not_found")),
        (row("h", chat(stream=True)), (400, "invalid_value")),
        (row("i", chat(tools=[1])), (400, "unsupported_parameter")),
    ]
    lines = [row("good"), *(line for line, *_ in bad_rows), *(line for line, _ in refused_rows)]
    client.batches._max_row_bytes = 65_000  # type: ignore[attr-defined]

    batch = ended(client, begin(client, *lines))

    assert [line["custom_id"] for line in lines_of(client, batch["output_file_id"])] == ["good"]
    errors = lines_of(client, batch["error_file_id"])
    bad, refused = errors[: len(bad_rows)], errors[len(bad_rows) :]
    found = [(line["custom_id"], line["error"]["code"]) for line in bad]
    assert found == [(custom_id, code) for _, custom_id, code in bad_rows]
    assert {line["response"] for line in bad} == {None}
    responses = [line["response"] for line in refused]
    assert [(one["status_code"], one["body"]["error"]["code"]) for one in responses] == [one for _, one in refused_rows]
    assert batch["request_counts"] == {"total": 16, "completed": 1, "failed": 15}


@pytest.mark.parametrize(
    ("lines", "found"), [((), "empty_file"), (["", " "], "empty_file"), ("1234", "too_many_requests")]
)
def test_a_file_that_makes_no_batch_fails(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, lines: list[str], found: str
) -> None:
    monkeypatch.setattr(batches_module, "MAX_ROWS", 3)
    batch = ended(client, begin(client, *lines), "failed")

    assert [error["code"] for error in batch["errors"]["data"]] == [found]


def test_failures_of_the_server_are_tried_again(
    client: httpx.Client, service: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "_PAUSE_S", 0.001)
    found = iter([BusyError("Full"), *["engine_failed"] * 3, *[BusyError("Full")] * 9, None])

    def fail(handle: RequestHandle) -> None:
        problem = next(found, "engine_failed")
        if isinstance(problem, Exception):
            raise problem
        handle.deliver(failed(problem) if problem else answer())

    service.on_submit = fail
    first = ended(client, begin(client, row("a")))
    second = ended(client, begin(client, row("a")))

    assert first["request_counts"]["completed"] == 1
    (line,) = lines_of(client, second["error_file_id"])
    assert line["response"]["status_code"] == 500
    assert len(service.asks) == 4 + batches_module.MAX_TRIES


@pytest.mark.parametrize(
    ("problem", "found"),
    [(None, "answer_not_kept"), (answer(choice={"a": math.nan, "b": 1.0}), "answer_not_kept"), (KeyError(), None)],
    ids=["too large", "not finite", "unforeseen"],
)
def test_a_row_whose_answer_cannot_be_kept_does_not_stop_the_others(
    client: httpx.Client, service: Counting, monkeypatch: pytest.MonkeyPatch, problem: Any, found: str | None
) -> None:
    monkeypatch.setattr(batches_module, "MAX_RECORD_BYTES", 5000)

    def answer_first(handle: RequestHandle) -> None:
        if service.asks or problem is None:
            handle.deliver(answer())
        elif isinstance(problem, Exception):
            service.asks.append(None)  # type: ignore[arg-type]
            raise problem
        else:
            handle.deliver(problem)

    service.on_submit = answer_first
    rows = [
        {"model": "default", "input": "What?", "metadata": {"a": "x" * length}}
        for length in (1 if problem else 5000, 1)
    ]
    lines = [row(str(number), body, url="/v1/responses") for number, body in enumerate(rows)]
    batch = ended(client, begin(client, *lines, endpoint="/v1/responses"))

    assert [line["custom_id"] for line in lines_of(client, batch["output_file_id"])] == ["1"]
    (line,) = lines_of(client, batch["error_file_id"])
    if found is None:
        assert line["response"]["status_code"] == 500
    else:
        assert line["error"]["code"] == found


def held(*, answered: int) -> tuple[StubService, threading.Event]:
    """A service that answers some requests and holds the others; the event is set when all others are held."""
    reached = threading.Event()

    def on_submit(handle: RequestHandle) -> None:
        if len(service.asks) < answered:
            handle.deliver(answer(f"answer {len(service.asks)}"))
        elif len(service.asks) + 1 >= answered + 4:
            reached.set()

    service = Counting()
    service.on_submit = on_submit
    return service, reached


ROWS = [row(str(number)) for number in range(20)]


def test_an_interrupted_batch_goes_on_where_it_was(folder: Path, service: Counting) -> None:
    stopped, reached = held(answered=8)
    with opened(folder, stopped) as client:
        batch_id = begin(client, *ROWS, "{")
        assert reached.wait(WAIT_S)
        assert client.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"] == 8
    (records,) = (folder / "batches").glob("*.jsonl")
    before = records.read_bytes()
    records.write_bytes(before + b'{"id": "batch_req_to')  # a line torn by a crash

    with opened(folder, service) as client:
        batch = ended(client, batch_id)

        lines = lines_of(client, batch["output_file_id"])
        assert [line["custom_id"] for line in lines] == [str(number) for number in range(20)]
        assert batch["request_counts"] == {"total": 21, "completed": 20, "failed": 1}
    assert len(service.asks) == 20 - 8


def test_a_crash_while_the_output_is_written_doubles_nothing(
    folder: Path, service: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = Batches._change

    def crash(self: Batches, batch: Any, status: Any = None, **fields: Any) -> Any:
        if status == "completed":
            raise asyncio.CancelledError  # ends the thread's task at this point
        return change(self, batch, status, **fields)

    monkeypatch.setattr(Batches, "_change", crash)
    with opened(folder, service) as client:
        batch_id = begin(client, *ROWS)
        ended(client, batch_id, "finalizing")
    monkeypatch.undo()

    with opened(folder, service) as client:
        batch = ended(client, batch_id)
        files = client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"]

        assert [file["id"] for file in files] == [batch["output_file_id"]]
        assert len(lines_of(client, batch["output_file_id"])) == 20
    assert len(service.asks) == 20


def test_a_cancelled_batch_keeps_its_answers_and_lets_its_file_go(folder: Path) -> None:
    service, reached = held(answered=8)
    with opened(folder, service) as client:
        batch_id = begin(client, *ROWS)
        assert reached.wait(WAIT_S)
        (file,) = client.get("/v1/files").json()["data"]
        assert error(client.delete(f"/v1/files/{file['id']}"))[:2] == (409, "file_in_use")
        assert client.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
        batch = ended(client, batch_id, "cancelled")

        assert len(lines_of(client, batch["output_file_id"])) == 8
        assert batch["cancelled_at"] is not None
        assert service.cancelled.is_set()
        assert error(client.post(f"/v1/batches/{batch_id}/cancel"))[:2] == (409, "batch_not_cancellable")
        assert client.delete(f"/v1/files/{file['id']}").status_code == 200


def test_batches_take_turns(folder: Path, service: Counting) -> None:
    with opened(folder, service) as client:
        release = threading.Event()
        client.batches._loop.call_soon_threadsafe(release.wait, WAIT_S)  # type: ignore[attr-defined]
        long, short = begin(client, *ROWS), begin(client, *ROWS[:3])
        release.set()
        ended(client, long)
        ended(client, short)

    clients = [ask.client for ask in service.asks]
    assert clients.count(f"batch:{short}") == 3
    assert max(place for place, client in enumerate(clients) if client == f"batch:{short}") < 12


def test_answers_end_when_the_disk_is_full_for_them(folder: Path, service: Counting) -> None:
    with opened(folder, service, max_total_bytes=20_000) as client:
        batch = ended(client, begin(client, *ROWS), "failed")

        assert [error["code"] for error in batch["errors"]["data"]] == ["storage_full"]
        assert 0 < len(lines_of(client, batch["output_file_id"])) < 20


def test_files_are_private_and_named_by_us(client: httpx.Client, folder: Path) -> None:
    file = upload(client, row("a"), name="../../etc/passwd").json()
    assert file["filename"] == "passwd"
    assert (file["object"], file["purpose"], file["bytes"]) == ("file", "batch", len(row("a")) + 1)
    ended(client, begin(client, row("a")))

    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert not [name for name in names if not name.startswith(("file-", "batch_")) and name != "lock"]


@pytest.mark.parametrize("name", ["expires_after[seconds]", "file[]", "purpose[]"])  # the first is OpenAI's
def test_a_part_that_is_not_known_is_named(refusing: httpx.Client, name: str) -> None:
    data = {"purpose": "batch", name: "3600"}
    error = refusing.post("/v1/files", files={"file": b"x"}, data=data).json()["error"]
    assert (error["message"], error["param"]) == (f"Unknown part `{name}`, or a second one.", name)


@pytest.mark.parametrize("file_id", ["file-0", "..%2Flock", "%2e%2e%2flock", "file-1/../../lock", "lock"])
def test_no_id_leads_out_of_the_folder(refusing: httpx.Client, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
        assert refusing.get(path).status_code in (404, 405)
    wanted = {"input_file_id": "../lock", "endpoint": CHAT, "completion_window": "24h"}
    assert error(refusing.post("/v1/batches", json=wanted))[:2] == (404, "file_not_found")


def test_files_are_listed_page_by_page_and_deleted(client: httpx.Client) -> None:
    ids = [upload(client, row("a")).json()["id"] for _ in range(3)]

    page = client.get("/v1/files", params={"limit": 2}).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    page = client.get("/v1/files", params={"after": page["last_id"]}).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[0]], False)
    assert client.get("/v1/files", params={"order": "asc"}).json()["first_id"] == ids[0]
    assert client.delete(f"/v1/files/{ids[0]}").json() == {"id": ids[0], "object": "file", "deleted": True}
    assert error(client.get(f"/v1/files/{ids[0]}"))[:2] == (404, "file_not_found")
    assert len(client.get("/v1/files").json()["data"]) == 2


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"max_file_bytes": 999}, "file_too_large"),
        ({"max_files": 1}, "too_many_files"),
        ({"max_total_bytes": 1500}, "storage_full"),
    ],
)
def test_uploads_beyond_a_limit_leave_nothing(
    folder: Path, service: Counting, limits: dict[str, int], found: str
) -> None:
    with opened(folder, service, **limits) as client:
        assert upload(client, "x" * 900).status_code == 200
        before = sorted(folder.rglob("*"))

        assert error(upload(client, "x" * 1000))[:2] == (413, found)
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("function", "failing"),
    [
        ("open_private", lambda *_: io.BufferedWriter(io.FileIO("/dev/full", "w"))),
        ("atomic_write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))),
    ],
)
def test_an_upload_to_a_full_disk_leaves_nothing(
    folder: Path, service: Counting, monkeypatch: pytest.MonkeyPatch, function: str, failing: Any, caplog: Any
) -> None:
    with opened(folder, service, max_total_bytes=1500) as client:
        before = sorted(folder.rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(file_store, function, failing)
            assert upload(client, "x" * 1000).status_code == 500
        assert sorted(folder.rglob("*")) == before
        assert upload(client, "x" * 1000).status_code == 200
    assert "OSError (No space left on device) in " in caplog.text


FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"files": {"file": b"x"}}, (400, "invalid_value")),
        ({"files": {"file": b"x"}, "data": {"purpose": "vision"}}, (400, "invalid_value")),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 100}}, (400, "invalid_value")),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, (400, "unknown_parameter")),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, (400, "unknown_parameter")),
        ({"files": {"purpose": (None, b"batch")}}, (400, "missing_required_parameter")),
        ({"data": {"purpose": "batch"}}, (415, "unsupported_media_type")),
        ({"content": b"--b\r\nfoo", "headers": FORM}, (400, "missing_required_parameter")),
        ({"content": b"nonsense", "headers": FORM}, (400, "invalid_value")),
    ],
)
def test_malformed_uploads_are_refused(refusing: httpx.Client, parts: dict[str, Any], found: tuple[int, str]) -> None:
    assert error(refusing.post("/v1/files", **parts))[:2] == found
    assert refusing.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize("hangs_up", [False, True])
def test_an_upload_that_ends_early_leaves_nothing(
    client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch, hangs_up: bool
) -> None:
    monkeypatch.setattr(uploads, "STALL_LIMIT_S", 0.05)
    half = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2**21
    options = {"path": "/v1/files", "content_type": FORM["content-type"], "is_whole": False, "hangs_up": hangs_up}
    sent = Client(half, **options).ask(client.app)  # type: ignore[attr-defined]

    assert hangs_up or (sent.status, sent.error["code"]) == (408, "request_timeout")
    assert os.listdir(folder / "files") == []


def test_keys_do_not_see_each_other_s_files(folder: Path, service: Counting) -> None:
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("first-key", "second-key"))
    with opened(folder, service, keys=("first-key", "second-key")) as client:
        assert upload(client, row("a")).status_code == 401
        client.headers.update(mine)
        batch_id = begin(client, row("a"))
        batch = ended(client, batch_id)
        paths = [
            f"/v1/batches/{batch_id}",
            *(f"/v1/files/{batch[name]}" for name in ("input_file_id", "output_file_id")),
        ]

        for path in (*paths, f"{paths[-1]}/content", "/v1/files", "/v1/batches"):
            assert (client.head(path).status_code, client.head(path).content) == (200, b"")
        for path in paths:
            assert client.get(path).status_code == 200
            assert client.get(path, headers=other).status_code == client.head(path, headers=other).status_code == 404
        assert client.get("/v1/files", headers=other).json()["data"] == []
        assert client.get("/v1/batches", headers=other).json()["data"] == []


def test_what_crashes_left_is_deleted_if_possible_and_foreign_files_stay(
    folder: Path, service: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder, service) as client:
        batch = ended(client, begin(client, row("a")))
    kept = os.listdir(folder / "files")
    for name in ("file-" + "0" * 32, ".file-1.partial", "file-2.json", "notes.txt"):
        (folder / "files" / name).write_text("{}")
    undeletable = ["file-" + "1" * 32, "file-3.json"]
    for place in (folder / "batches" / f"{batch['id']}.jsonl", *(folder / "files" / name for name in undeletable)):
        place.mkdir()

    with opened(folder, service) as client:
        listed = {file["id"] for file in client.get("/v1/files").json()["data"]}
        assert client.get("/v1/batches").json()["data"] == [batch]
    assert listed == {batch["input_file_id"], batch["output_file_id"]}
    assert sorted(os.listdir(folder / "files")) == sorted([*kept, "notes.txt", *undeletable])
    (told,) = (message for message in caplog.messages if "file-2.json" in message)
    assert "is removed: the file that it describes is gone" in told
    (told,) = (message for message in caplog.messages if "file-3.json" in message)
    assert "file-3.json stays: " in told


DEEP = b"[" * 100_000
SPOILT_BATCHES: dict[str, Any] = {
    "num_rows": ["x", -1, True, 10**30],
    "created_at": [math.nan, math.inf, 10**400, -1],
    "times": [{"completed": "x"}, {"lunch": 1.0}, {"completed": math.inf}],
    "status": ["done"],
    "input_file_id": ["../../lock", "file-1"],
    "output_file_id": ["/etc/passwd"],
    "endpoint": ["/v1/embeddings"],
    "more": [1],
}
SPOILT_FILES: dict[str, Any] = {
    "num_bytes": ["x"],
    "created_at": [math.nan, 10**400],
    "purpose": ["other"],
    "more": [1],
}


def damaged_copies(good: Path, spoilt: dict[str, Any], *, name: str) -> list[Path]:
    """Write damaged copies of a JSON file, and a folder and a pipe, each with an id of its own."""
    content = good.read_bytes()
    values = [json.loads(content) | {key: value} for key, values in spoilt.items() for value in values]
    texts = [DEEP, b"", b"\xff\0\xfe" * 50, content[:-9], b"null", b"[1]", b"x" * 2**21, content]
    paths = [good.with_name(f"{name}{number:032x}.json") for number in range(len(values) + len(texts) + 2)]
    for path, value in zip(paths[2:], values, strict=False):
        path.write_text(json.dumps({**value, "id": path.stem}))
    for path, text in zip(paths[2 + len(values) :], texts, strict=True):
        path.write_bytes(text)  # the last one has the id of the good file
    paths[0].mkdir()
    os.mkfifo(paths[1])
    return paths


def test_damaged_states_are_told_and_left_alone(
    folder: Path, service: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(folder, service) as client:
        batch = ended(client, begin(client, row("a")))
    damaged = damaged_copies(folder / "batches" / f"{batch['id']}.json", SPOILT_BATCHES, name="batch_")
    described = damaged_copies(folder / "files" / f"{batch['input_file_id']}.json", SPOILT_FILES, name="file-")
    for path in described:
        path.with_suffix("").write_bytes(b"rows")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with opened(folder, service) as client:
        batches, files = client.get("/v1/batches").json()["data"], client.get("/v1/files").json()["data"]
        assert batches == [batch]
        assert {file["id"] for file in files} == {batch["input_file_id"], batch["output_file_id"]}
        ended(client, begin(client, row("b")))

    assert all(path.read_bytes() == content for path, content in before.items())
    told = [message for message in caplog.messages if "is left out: " in message]
    assert len(told) == len(damaged) + len(described)
    assert all(any(path.name in message for message in told) for path in (*damaged, *described))
    assert not any("lunch" in message for message in told), "the log quotes no values"


def test_batches_with_damaged_journals_fail_and_others_go_on(folder: Path) -> None:
    service, reached = held(answered=2)
    with opened(folder, service) as client:
        batch_id = begin(client, *ROWS)
        assert reached.wait(WAIT_S)
        wait_for(lambda: client.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"] == 2)
    good = folder / "batches" / f"{batch_id}.json"
    first, second = good.with_suffix(".jsonl").read_text().splitlines()
    record = json.loads(first)
    texts = {
        "deep": DEEP.decode(),
        "binary": "\0\1\2",
        "no number": json.dumps({**record, "line": "x"}),
        "no output": json.dumps({**record, "output": [1]}),
        "another type": json.dumps({**record, "output": {"custom_id": 1}}),
        "of other records": json.dumps({key: record[key] for key in record if key not in ("line", "output")}),
        "no rows": first,
    }
    kinds = {good.with_name(f"batch_{at:032x}.json"): kind for at, kind in enumerate(["a folder", "a pipe", *texts])}
    for path, kind in kinds.items():
        rows = {"input_file_id": "file-" + "0" * 32} if kind == "no rows" else {}
        path.write_text(json.dumps({**json.loads(good.read_text()), "id": path.stem, **rows}))
        journal = path.with_suffix(".jsonl")
        if kind == "a folder":
            journal.mkdir()
        elif kind == "a pipe":
            os.mkfifo(journal)
        else:
            journal.write_text(f"{texts[kind]}\n{second}\n")

    with opened(folder, Counting()) as client:
        for path, kind in kinds.items():
            failed = ended(client, path.stem, "failed")
            assert [error["code"] for error in failed["errors"]["data"]] == ["damaged_batch"], kind
            assert kind == "no rows" or path.with_suffix(".jsonl").exists(), kind
        ended(client, batch_id)


def test_a_folder_has_one_server_and_no_other_readers(folder: Path, service: Counting) -> None:
    with opened(folder, service), pytest.raises(UsageError), opened(folder, service):
        pass
    folder.chmod(0o755)
    with pytest.raises(UsageError), opened(folder, service):
        pass


def test_unfinished_batches_have_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "MAX_UNFINISHED", 1)
    service, _ = held(answered=0)
    with opened(folder, service) as client:
        begin(client, row("a"))
        assert error(created(client, row("a")))[:2] == (429, "too_many_batches")
        assert error(created(client, row("a"), endpoint="/v1/embeddings"))[:2] == (400, "invalid_value")


def test_old_batches_are_forgotten(client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "MAX_BATCHES", 2)
    ids = []
    for _ in range(3):
        ids.append(begin(client, row("a")))
        ended(client, ids[-1])

    page = client.get("/v1/batches").json()
    assert [batch["id"] for batch in page["data"]] == [ids[2], ids[1]]
    assert len(list((folder / "batches").iterdir())) == 2


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/batch_1"])
def test_without_a_folder_clients_are_told_what_to_do(server: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        response = server.request(method, path)
        assert error(response)[:2] == (404, "files_not_enabled")
        assert response.json()["error"]["message"].endswith(": send each request to its own path.")
