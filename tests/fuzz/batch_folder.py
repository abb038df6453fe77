"""The folder of `serve --batch-folder`: a server starts with any content, and each batch that it serves ends."""

import json

from llama_adapter.app.serving.http_api.api import ApiSettings, open_batches
from llama_adapter.app.serving.http_api.file_routes import FileObject, _batch_object
from llama_adapter.app.serving.http_api.file_store import FileLimits
from tests.app.serving.http_api.live import StubService
from tests.app.serving.http_api.requests import chat
from tests.fuzz.mutators import either, mutated_bytes, mutated_json, mutated_lines, words
from tests.fuzz.target import Target, new_folder


class _Service(StubService):
    batch_size = 2


_BATCH, _FILE = "batch_" + "0" * 32, "file-" + "1" * 32
_CHAT = "/v1/chat/completions"


def run(data: bytes) -> str:
    """A batch's state on the first line, the description of its file on the second one, and its journal."""
    state, description, journal = (*data.split(b"\n", 2), b"", b"")[:3]
    folder = new_folder("batch-folder")
    folder.chmod(0o700)
    for part in ("files", "batches"):
        (folder / part).mkdir(mode=0o700)
    kept = {folder / "batches" / f"{_BATCH}.json": state, folder / "files" / f"{_FILE}.json": description}
    files = {folder / "files" / _FILE: _rows(), folder / "batches" / f"{_BATCH}.jsonl": journal, **kept}
    for path, content in files.items():
        path.write_bytes(content)
    batches = open_batches(str(folder), _Service(), settings=ApiSettings(), limits=FileLimits())  # type: ignore[arg-type]
    try:
        found, stored = batches.all(owner=None), batches.files.all(owner=None)
        assert all(path.read_bytes() == content for path, content in files.items()), "it was changed before it was used"
        for batch in found:
            _batch_object(batch)
            if not batch.is_finished:
                batches._loop.run_until_complete(batches._run(batch.id))
        ended = batches.all(owner=None)
        told = [_batch_object(batch).model_dump_json() for batch in ended]
        told += [FileObject.model_validate(file).model_dump_json() for file in batches.files.all(owner=None)]
        assert all(batch.is_finished for batch in ended)
    finally:
        batches._loop.close()
        batches.files.close()
    codes = sorted({error.code for batch in ended for error in batch.errors})
    good = "ok" if found and stored else "left out"
    return f"{good} {len(found)} {len(stored)} {[batch.status for batch in ended]} {codes} {len(told)}"


def _rows() -> bytes:
    rows = ({"custom_id": name, "method": "POST", "url": _CHAT, "body": chat()} for name in "ab")
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _folders() -> dict[str, bytes]:
    about = {"id": _FILE, "name": "a.jsonl", "purpose": "batch", "num_bytes": 9, "created_at": 1.5, "owner": None}
    record = {
        "id": "r", "picture": "line 1", "prompt": "", "text": "", "finish": "stop", "choice": None, "tokens": 0,
        "error": None, "ms": {}, "run": _BATCH, "line": 1, "output": {"custom_id": "a", "error": None},
    }  # fmt: skip
    folders = {}
    for status in ("validating", "in_progress", "finalizing", "cancelling", "failed", "completed"):
        batch = {
            "id": _BATCH, "owner": "key:1", "endpoint": _CHAT, "input_file_id": _FILE, "metadata": {"a": "b"},
            "created_at": 1.5, "status": status, "times": {status: 2.5}, "output_file_id": None, "error_file_id": None,
            "errors": [{"code": "c", "message": "m", "param": None, "line": None}], "num_rows": 2, "num_completed": 1,
            "num_failed": 0,
        }  # fmt: skip
        folders[status] = "\n".join(map(json.dumps, (batch, about, record, ""))).encode()[:-2]
    return folders


_WORDS = (
    *words("validating in_progress finalizing cancelling cancelled completed failed batch batch_output"),
    *(_BATCH, _FILE, f"{_FILE}-output", _CHAT, "/v1/responses", {"completed": 1.0}),
)


_mutate = either(mutated_lines(mutated_json(*_WORDS)), mutated_lines(mutated_bytes(b"\0", b"\n", b"{")))
TARGETS = (Target("batch-folder", run, _folders, _mutate, quick_rounds=30),)
