"""The files of docs/operating, as far as a machine without systemd and Docker can try them."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llama_adapter.app.command_line.main import build_parser
from llama_adapter.app.models.resources import sample_pictures
from tests.app.serving.http_api.requests import chat, data_uri, image, user
from tests.app.serving.online.waiting import wait_for
from tests.app.serving.server_process import ServerProcess

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "operating"
PICTURE = sorted(sample_pictures().glob("*.png"))[0]
NAME = "pictures.example"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = re.search(r"llama-adapter web --port 8000 (.*)", (FOLDER / "nginx.conf").read_text())
    assert flags is not None
    command = ("-m", "llama_adapter", "web")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("TMPDIR", str(tmp_path_factory.mktemp("uploads")))
        one = ServerProcess(*shlex.split(flags[1]), "--log-format", "json", command=command)
        yield one
    one.kill()


@pytest.fixture(scope="module")
def proxy(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of nginx with the file of the documentation: its ports and certificates are replaced, nothing else."""
    folder = tmp_path_factory.mktemp("nginx")
    folder.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},DNS:localhost"]
    files = ["-keyout", str(folder / "own.key"), "-out", str(folder / "own.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *subject, *files], check=True, capture_output=True)
    text = (FOLDER / "nginx.conf").read_text()
    for old, new in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/certs/pictures.example.pem", str(folder / "own.pem")),
        ("/etc/ssl/private/pictures.example.key", str(folder / "own.key")),
        ("http://127.0.0.1:8000;", f"{server.url};"),
    ):
        assert old in text
        text = text.replace(old, new)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    own = f"pid {folder}/pid; events {{}} http {{ access_log off; {places}\n{text}}}"
    (folder / "nginx.conf").write_text(own)
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert nginx is not None, "scripts/get_programs.sh installs it"
    options = ["-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    process = subprocess.Popen([nginx, *options, "-g", "daemon off;"], stderr=subprocess.DEVNULL)

    def listens() -> bool:
        assert process.poll() is None, (folder / "error.log").read_text()
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    wait_for(listens)
    yield port
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)


def ask(port: int, path: str, body: object = None) -> tuple[int, str]:
    """Status and text of a request to `pictures.example` through the proxy."""
    method, url = "GET" if body is None else "POST", f"https://localhost:{port}{path}"
    # The certificate is one of this test.
    reply = httpx.request(method, url, json=body, headers={"Host": NAME}, timeout=120, verify=False, trust_env=False)
    return reply.status_code, reply.text


def test_behind_nginx_the_api_and_the_page_are_at_the_path_until_a_hangup(server: ServerProcess, proxy: int) -> None:
    about = user(image(data_uri(PICTURE.read_bytes(), kind="png")), "Generate caption of this image")
    status, text = ask(proxy, "/llama/v1/chat/completions", chat(about))
    assert status == 200
    assert "moon" in json.loads(text)["choices"][0]["message"]["content"]
    status, text = ask(proxy, "/llama/v1/chat/completions", chat(about, stream=True))
    assert (status, text.count("data: [DONE]")) == (200, 1)

    status, page = ask(proxy, "/llama/")
    assert status == 200
    assert f'"root":"https://{NAME}/llama"' in page.replace('": "', '":"')
    files = re.findall(r'(?:href|src)="\./([^"]+\.(?:js|css))"', page)
    assert files, page
    assert {ask(proxy, f"/llama/{path}")[0] for path in files} == {200}

    records = [json.loads(line) for line in server.lines]
    asked = [one for one in records if one.get("route", "").endswith("/v1/chat/completions")]
    assert [(one["status"], one["forwarded_for"]) for one in asked] == [(200, "127.0.0.1")] * 2

    os.kill(server.pid, signal.SIGHUP)
    assert server.wait(timeout_s=60) == 0
    assert "draining" in "\n".join(server.lines)
    assert not any(Path(os.environ["TMPDIR"]).rglob("*upload*"))


def test_the_unit_names_a_command_that_exists_and_waits_longer_than_the_server() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / "llama-adapter.service")
    program, *flags = shlex.split(unit["Service"]["ExecStart"])
    options = build_parser().parse_args(flags)

    assert program.endswith("/bin/llama-adapter")
    assert float(unit["Service"]["TimeoutStopSec"]) > options.drain_s
