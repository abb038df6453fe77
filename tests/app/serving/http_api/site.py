"""`llama-adapter serve` with its own host names and a loopback address treated as public; tests redirects offline."""

import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llama_adapter.app.pictures.inputs import fetching
from llama_adapter.app.pictures.inputs.fetching import Network
from llama_adapter.app.pictures.inputs.urls import is_public

COMMAND = ("-m", "tests.app.serving.http_api.site")  # for a `ServerProcess`
PUBLIC = "127.0.0.1"  # treated as public by this server
SITE = "pictures.test"  # the name of the site below
# Allowed hosts that must not be fetched from: the addresses of each, and the error code.
HOSTS: dict[str, tuple[list[str], str]] = {
    "mixed.test": ([PUBLIC, "192.168.1.1"], "image_host_not_allowed"),
    "unknown.test": ([], "failed_to_download_image"),
}
# Paths of the site: where each redirects to, and the error code.
PATHS = {
    "/to-private-name": ("http://mixed.test:{port}/", "image_host_not_allowed"),
    "/to-number": ("http://2130706433:{port}/picture.png", "invalid_image_url"),
    "/to-metadata": ("http://169.254.169.254/latest/meta-data/", "invalid_image_url"),
    "/to-file": ("file:///etc/passwd", "invalid_image_url"),
    "/round": ("/round", "failed_to_download_image"),
    "/page": ("", "unsupported_image_media_type"),
}


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of the names above; raises OSError for other names."""
    addresses = [PUBLIC] if host == SITE else HOSTS[host][0] if host in HOSTS else []
    if not addresses:
        raise OSError("no such name")
    return addresses


class RedirectingSite(ThreadingHTTPServer):
    """A site on loopback with the redirects above and other invalid pictures."""

    def __init__(self) -> None:
        super().__init__((PUBLIC, 0), _Handler)
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """A redirect, an HTML page, or an endless picture."""

    def do_GET(self) -> None:
        if location := PATHS.get(self.path, ("",))[0]:
            self.send_response(302)
            self.send_header("Location", location.format(port=self.server.server_port))  # type: ignore[attr-defined]
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/page" else "image/png")
        self.end_headers()
        try:
            for _ in range(1 if self.path == "/page" else 4096):
                self.wfile.write(bytes(2**20))
        except OSError:
            self.close_connection = True  # the client disconnected

    def log_message(self, format: str, *args: object) -> None:
        pass


def network() -> Network:
    """The server's network, with the names above and one more public address."""
    return Network(resolve=resolve, is_allowed=lambda address: address == PUBLIC or is_public(address))


def main() -> int:
    from llama_adapter.__main__ import main as serve

    fetching.Network = network  # type: ignore[assignment, misc]
    sys.argv[1:1] = ["serve"]
    return serve()


if __name__ == "__main__":
    sys.exit(main())
