"""The Hugging Face Hub and a server of released files, on the loopback address."""

import hashlib
import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".model", ".pth", ".pt")  # which the Hub keeps in LFS


@dataclass
class Hub:
    """Repositories and files, faults that the next answers have, and what was asked for."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # answered with 401 without a token, with 403 with one
    files: dict[str, bytes] = field(default_factory=dict)  # by path
    address: str = ""
    takes_ranges: bool = True
    statuses: list[int] = field(default_factory=list)  # of the next answers that have content
    cuts: list[int] = field(default_factory=list)  # bytes after which the next contents end
    damages: bool = False
    waits: Event | None = None  # contents are held back, after their first half, until it is set
    asked: list[tuple[str, str, str, str]] = field(default_factory=list)  # method, path, range, authorization

    def add_folder(self, repo: str, folder: Path, **more: bytes) -> None:
        """Add a repository with the files of a folder."""
        self.repos[repo] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | more

    def contents(self) -> list[str]:
        """The ranges of the contents that were asked for; "" is a whole file."""
        return [ranged for method, path, ranged, _ in self.asked if method == "GET" and not path.startswith("/api")]


def etag(name: str, content: bytes) -> str:
    """The digest that the Hub gives a file."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    """Serve it on a free port; its `address` is set."""

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield hub
    finally:
        if hub.waits is not None:
            hub.waits.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(has_content=False)

    def do_GET(self) -> None:
        self._answer(has_content=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, has_content: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "")
        self.state.asked.append((self.command, path, self.headers.get("Range", ""), token))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            return self._describe(match[1], match[2], match[3] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, revision, name = match.groups()
            if repo in self.state.gated:
                return self._end(403 if token else 401, {"X-Error-Code": "GatedRepo"})
            if repo not in self.state.repos or revision not in ("main", COMMIT):
                return self._end(404, {"X-Error-Code": "RepoNotFound"})
            if name not in self.state.repos[repo]:
                return self._end(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            content = self.state.repos[repo][name]
            more = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag(name, content)}"'}
            return self._send(content, more, has_content=has_content)
        if (found := self.state.files.get(path)) is None:
            return self._end(404)
        self._send(found, {}, has_content=has_content)

    def _describe(self, repo: str, kind: str | None, revision: str) -> None:
        files = self.state.repos.get(repo)
        if files is None:
            return self._end(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._end(404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "tree":
            return self._json([_entry(name, content) for name, content in files.items()])
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        gated: Any = "manual" if repo in self.state.gated else False
        more = {"private": False, "gated": gated, "cardData": {"license": "apache-2.0"}, "tags": []}
        self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, **more})

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._end(200, {"Content-Type": "application/json"}, body)

    def _end(self, status: int, headers: Mapping[str, str] = {}, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _send(self, content: bytes, headers: Mapping[str, str], *, has_content: bool) -> None:
        state = self.state
        if has_content and state.statuses:
            return self._end(state.statuses.pop(0))
        if has_content and state.damages:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(start[1]) if start and state.takes_ranges else 0
        if first >= len(content) > 0:
            return self._end(416, {"Content-Range": f"bytes */{len(content)}"})
        is_part = start is not None and state.takes_ranges
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        for name, value in {**headers, "Content-Length": str(len(content) - first)}.items():
            self.send_header(name, value)
        self.end_headers()
        if not has_content:
            return
        body = content[first:]
        if state.cuts:
            self.wfile.write(body[: state.cuts.pop(0)])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        half = len(body) // 2 if state.waits is not None else 0
        self.wfile.write(body[:half])
        self.wfile.flush()
        if state.waits is not None:
            state.waits.wait(30)
        self.wfile.write(body[half:])


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": etag("", content)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": etag(name, content), "size": len(content), "pointerSize": 130}
    return entry
