"""Files at addresses arrive whole and once, whatever the server and the network do."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from llama_adapter.app.models.named import file_source
from llama_adapter.app.models.named.file_source import FileSource
from llama_adapter.app.models.named.hub_source import HubSource
from llama_adapter.app.models.named.source import DownloadError
from llama_adapter.runtime.problems import describe
from tests.fakes.hub import Hub

CONTENT = bytes(range(256)) * 2000


@pytest.fixture
def source(hub: Hub) -> FileSource:
    hub.files["/releases/a.pth"] = CONTENT
    return FileSource(
        url=f"{hub.address}/releases/a.pth", sha256=hashlib.sha256(CONTENT).hexdigest(), page="https://a.example"
    )


def fetch(source: FileSource) -> Path:
    return source.fetch(tell=lambda line: None)


@pytest.mark.parametrize(
    ("fault", "ranges"),
    [
        ({}, [""]),
        ({"cuts": [100_000, 50_000]}, ["", "bytes=100000-", "bytes=150000-"]),
        ({"cuts": [100_000], "takes_ranges": False}, ["", "bytes=100000-"]),
        ({"cuts": [0, 0]}, ["", "", ""]),
        ({"statuses": [503, 429]}, ["", "", ""]),
        ({"cuts": [10, 10, 10, 10, 10]}, ["", *(f"bytes={n}0-" for n in range(1, 6))]),
    ],
    ids=["none", "cut", "no-ranges", "cut-at-once", "busy", "often"],
)
def test_a_file_arrives_whole(fault: dict[str, Any], ranges: list[str], hub: Hub, source: FileSource) -> None:
    vars(hub).update(fault)

    place = fetch(source)

    assert place.read_bytes() == CONTENT
    assert hub.contents() == ranges
    assert source.here() == place
    assert [check.fault for check in source.check()] == [""]
    assert fetch(source) == place
    assert hub.contents() == ranges, "it is fetched once"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"damages": True}, "and .* was published"),
        ({"statuses": [404]}, "status 404"),
        ({"statuses": [403]}, "status 403"),
        ({"statuses": [401]}, "status 401"),
        ({"statuses": [500, 500, 500]}, "status 500"),
        ({"cuts": [0, 0, 0]}, "could not be fetched"),
    ],
    ids=["damaged", "missing", "forbidden", "unauthorised", "broken", "cut"],
)
def test_a_failure_names_the_address_and_a_way_out(
    change: dict[str, Any], said: str, hub: Hub, source: FileSource
) -> None:
    vars(hub).update(change)

    with pytest.raises(DownloadError, match=said) as failed:
        fetch(source)

    assert source.url in failed.value.message
    assert failed.value.hint
    assert failed.value.exit_code == 1
    assert source.here() is None
    hub.damages = False
    assert fetch(source).read_bytes() == CONTENT, "the next run starts well"


@pytest.mark.parametrize("left", [CONTENT[:1000], b"x" * 1000, CONTENT, CONTENT + b"more"])
def test_what_a_killed_process_left_is_continued_or_replaced(left: bytes, hub: Hub, source: FileSource) -> None:
    source.folder().mkdir(parents=True)
    (source.folder() / "a.pth.part").write_bytes(left)
    is_right = CONTENT.startswith(left)

    if not is_right and len(left) < len(CONTENT):
        with pytest.raises(DownloadError, match="SHA-256"):
            fetch(source)

    assert fetch(source).read_bytes() == CONTENT
    assert hub.contents()[0] == f"bytes={len(left)}-"
    assert not (source.folder() / "a.pth.part").exists()


def test_a_full_disk_is_named(hub: Hub, source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
        with pytest.raises(DownloadError, match=r"512 kB are to be fetched into .*, and its disk has 1 kB free"):
            fetch(source)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as late:
        late.setattr(file_source.os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as failed:
            fetch(source)
    assert "a.pth.part" in describe(failed.value).sentence


def test_an_unknown_size_is_asked_for(hub: Hub, source: FileSource) -> None:
    assert source.missing().bytes == len(CONTENT)
    assert hub.contents() == []


FETCHING = """
import sys
from llama_adapter.app.models.named.file_source import FileSource
print(FileSource(url=sys.argv[1], sha256=sys.argv[2], page="p").fetch(tell=lambda line: print(line, flush=True)))
"""


def started(source: FileSource) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", FETCHING, source.url, source.sha256]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def await_that(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("waited for 30 s")


def test_a_second_process_waits_and_takes_the_file_of_the_first(hub: Hub, source: FileSource) -> None:
    hub.waits = threading.Event()
    with started(source) as first:
        await_that(lambda: len(hub.contents()) == 1)
        with started(source) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting for `a.pth`\n"
            hub.waits.set()
            place = str(source.folder() / "a.pth")
            assert first.communicate(timeout=60)[0].strip() == place
            assert second.communicate(timeout=60)[0].strip() == place

    assert hub.contents() == [""]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080", "'socksio' package is not installed"),
        ("all_proxy", "socks://127.0.0.1:1080/", "Unknown scheme for proxy URL"),  # as GNOME writes it
        ("HTTPS_PROXY", "http://proxy.example:port", "Invalid port"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem", "No such file or directory"),
    ],
)
def test_a_wrong_proxy_or_certificate_is_named(
    variable: str, value: str, said: str, hub: Hub, source: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_session()
    monkeypatch.setenv(variable, value)
    if "socksio" in said:
        monkeypatch.setitem(sys.modules, "socksio", None)
    for other in (source, HubSource(repo="a/b")):
        with pytest.raises(DownloadError, match=f"The HTTP client cannot be made: .*{said}") as failed:
            other.fetch(tell=lambda line: None)
        assert variable.upper() in failed.value.hint
    close_session()
