"""Remote pictures come only from hosts that are allowed at every redirect, from checked addresses, within limits."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from llama_adapter.app.pictures.inputs.fetching import MAX_REDIRECTS, Network, fetch_picture
from llama_adapter.app.pictures.inputs.urls import AllowedHost, FetchError, PictureUrl, is_public

REDIRECTS = yaml.safe_load(Path(__file__).with_name("urls.yaml").read_text(encoding="utf-8"))["no redirects"]
PICTURE = b"\x89PNG and so on"


def answer(body: bytes = PICTURE, *, status: str = "200 OK", **headers: str) -> bytes:
    named = {"content_type": "image/png", "content_length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items() if value]
    return f"HTTP/1.1 {status}\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def redirect(location: str, *, status: str = "302 Found") -> bytes:
    return answer(b"", status=status, location=location, content_type="")


class Site:
    """A server on loopback that returns prepared bytes for each path, and a resolver whose names lead to it."""

    def __init__(self, pages: dict[str, bytes | None] | None = None) -> None:
        self.pages = {"/": answer()} if pages is None else pages  # None: the server never answers
        self.heads: list[str] = []  # heads of received requests
        self.names: dict[str, Sequence[str]] = {}  # names that resolve to other addresses
        self.asked: list[str] = []  # names that were looked up
        self.port = 0
        self.tasks: list[asyncio.Task[None]] = []  # connections

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.names.get(host, ["127.0.0.1"])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())  # type: ignore[arg-type]
        with suppress(OSError):  # clients are expected to disconnect
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            content = self.pages.get(head.split(" ")[1], answer(b"", status="404 Not Found"))
            if content is None:
                await reader.read()
            for start in range(0, len(content or b""), 4096):  # in several pieces, like a network
                writer.write(content[start : start + 4096])
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    def fetch(
        self,
        path: str = "/",
        *,
        host: str = "pictures.test",
        allowed: Sequence[str] = ("http://pictures.test:{port}", "http://other.test:{port}"),
        max_bytes: int = 1000,
        timeout_s: float = 20.0,
        is_allowed: Callable[[str], bool] = lambda address: address == "127.0.0.1",
        context: ssl.SSLContext | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> bytes:
        async def run() -> bytes:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=context)
            self.port = server.sockets[0].getsockname()[1]
            self.pages = {
                key: page.replace(b"{port}", str(self.port).encode()) if page else page
                for key, page in self.pages.items()
            }
            network = Network(resolve=self.resolve, is_allowed=is_allowed)
            if trust is not None:
                network = Network(resolve=self.resolve, is_allowed=is_allowed, ssl_context=lambda: trust)
            try:
                return await fetch_picture(
                    PictureUrl.parse(f"{'https' if context else 'http'}://{host}:{self.port}{path}"),
                    allowed=[AllowedHost.parse(entry.format(port=self.port)) for entry in allowed],
                    max_bytes=max_bytes,
                    timeout_s=timeout_s,
                    network=network,
                )
            finally:
                server.close()
                await server.wait_closed()
                await asyncio.gather(*self.tasks, return_exceptions=True)
                self.tasks.clear()

        return asyncio.run(run())

    def refused(self, path: str = "/", **options: object) -> FetchError:
        with pytest.raises(FetchError) as caught:
            self.fetch(path, **options)  # type: ignore[arg-type]
        return caught.value


def test_a_picture_of_an_allowed_host_comes_whole() -> None:
    site = Site({"/a.png?width=3": answer(PICTURE * 1000)})

    assert site.fetch("/a.png?width=3", max_bytes=len(PICTURE) * 1000) == PICTURE * 1000


def test_the_request_carries_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine pictures.test login somebody password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    site = Site()

    site.fetch()

    names = [line.partition(":")[0].lower() for line in site.heads[0].splitlines()[1:] if line]
    assert sorted(names) == ["accept", "accept-encoding", "host", "user-agent"]
    assert f"host: pictures.test:{site.port}" in site.heads[0].lower()


def test_a_name_is_looked_up_once_and_the_checked_address_is_connected_to() -> None:
    site = Site()
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.3"]])

    async def rebind(host: str, port: int) -> Sequence[str]:
        site.asked.append(host)
        return next(answers)

    site.resolve = rebind  # type: ignore[method-assign]

    assert site.fetch() == PICTURE
    assert site.asked == ["pictures.test"]


@pytest.mark.parametrize(
    "addresses",
    [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], []],
)
def test_a_name_with_any_address_that_is_not_allowed_is_never_connected_to(addresses: Sequence[str]) -> None:
    site = Site()
    site.names["pictures.test"] = addresses

    error = site.refused()

    assert error.code == "image_host_not_allowed"
    assert site.heads == []
    assert not any(address in error.message for address in addresses)


def test_only_public_addresses_are_allowed_when_nothing_else_is_said() -> None:
    url = PictureUrl.parse("http://localhost:9/")

    assert Network().is_allowed is is_public
    with pytest.raises(FetchError) as caught:
        asyncio.run(fetch_picture(url, allowed=[AllowedHost.parse("http://localhost:9")], max_bytes=9, timeout_s=20))
    assert caught.value.code == "image_host_not_allowed"


@pytest.mark.parametrize("addresses", [["127.0.0.9", "127.0.0.1"], ["127.0.0.1", "127.0.0.9"]])
def test_any_of_a_names_addresses_may_be_the_one_that_answers(addresses: Sequence[str]) -> None:
    site = Site()
    site.names["pictures.test"] = addresses  # the server listens at only one of these addresses

    assert site.fetch(is_allowed=lambda address: address.startswith("127.")) == PICTURE


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed_to_hosts_that_are_allowed(status: str) -> None:
    site = Site({"/": redirect("http://other.test:{port}/a", status=status), "/a": redirect("b"), "/b": answer()})

    assert site.fetch() == PICTURE
    assert site.asked == ["pictures.test", "other.test", "other.test"]


@pytest.mark.parametrize("location", REDIRECTS)
def test_a_redirect_leads_nowhere_that_a_url_may_not(location: str) -> None:
    site = Site({"/": redirect(location)})
    site.names["other.test"] = ["192.168.1.1"]

    assert site.refused().code in ("image_host_not_allowed", "invalid_image_url")
    assert len(site.heads) == 1


def test_redirects_come_to_an_end() -> None:
    site = Site({"/": redirect("/")})

    assert site.refused().code == "failed_to_download_image"
    assert len(site.heads) == 1 + MAX_REDIRECTS


def endless(**framing: str) -> bytes:
    """An answer with many chunks and no length."""
    return answer(b"", content_length="", **framing) + (b"3e8\r\n" + bytes(1000) + b"\r\n") * 2000


@pytest.mark.parametrize(
    ("page", "code"),
    [
        (answer(b"", content_length="1001"), "image_file_too_large"),  # it is not read
        (endless(transfer_encoding="chunked"), "image_file_too_large"),
        (endless(connection="close"), "image_file_too_large"),
        (answer(content_type="text/html"), "unsupported_image_media_type"),
        (answer(content_type=""), "unsupported_image_media_type"),
        (answer(content_type="text/html; image/png"), "unsupported_image_media_type"),
        (answer(content_encoding="gzip"), "failed_to_download_image"),
        (answer(b""), "empty_image_file"),
        (answer(status="404 Not Found"), "failed_to_download_image"),
        (answer(status="204 No Content", content_length=""), "failed_to_download_image"),
        (answer(status="302 Found"), "failed_to_download_image"),
        (answer(content_length="500"), "failed_to_download_image"),
        (answer(content_length="1, 2"), "failed_to_download_image"),
        (answer(content_length="9" * 5000), "failed_to_download_image"),
        (answer(padding="a" * 200_000), "failed_to_download_image"),
        (b"", "failed_to_download_image"),
        (b"SSH-2.0-OpenSSH\r\n", "failed_to_download_image"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n", "failed_to_download_image"),
    ],
)
def test_anything_but_a_plain_answer_with_a_picture_is_refused(page: bytes, code: str) -> None:
    error = Site({"/": page}).refused()

    assert (error.code, error.http_status) == (code, 413 if code == "image_file_too_large" else 400)


def test_a_server_that_does_not_answer_is_given_up() -> None:
    error = Site({"/": None}).refused(timeout_s=0.05)

    assert error.code == "failed_to_download_image"
    assert "0.05 seconds" in error.message


def test_a_name_that_cannot_be_looked_up_is_an_error_in_words() -> None:
    site = Site()

    async def fail(host: str, port: int) -> Sequence[str]:
        raise OSError("no such name")

    site.resolve = fail  # type: ignore[method-assign]

    assert site.refused().code == "failed_to_download_image"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_a_certificate_has_to_be_of_the_name_and_not_of_the_address(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-keyout {key.name} -out {certificate.name} -subj /CN=pictures.test -addext subjectAltName=DNS:pictures.test"
    )
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trust = ssl.create_default_context(cafile=str(certificate))
    allowed = ("pictures.test:{port}", "other.test:{port}")

    assert Site().fetch(context=context, trust=trust, allowed=allowed) == PICTURE
    for host, trusted in (("other.test", trust), ("pictures.test", None)):
        error = Site().refused(host=host, context=context, trust=trusted, allowed=allowed)
        assert error.code == "failed_to_download_image"
