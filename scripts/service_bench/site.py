"""`llama-adapter serve` with a resolver of its own that calls loopback public, so that redirects can be tested offline.

Started as a process: python -m scripts.service_bench.site --port 0 ...
"""

import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from llama_adapter.app.http_api import fetching
from llama_adapter.app.http_api.addresses import is_public
from llama_adapter.app.http_api.fetching import Network

PUBLIC = "127.0.0.1"  # of this server, it counts as public
NAMES = {
    "pictures.test": [PUBLIC],
    "private.test": ["10.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "mixed.test": [PUBLIC, "192.168.1.1"],
    "mapped.test": [f"::ffff:{PUBLIC}"],
}
PAGES = {
    "/to-private-name": "http://private.test:{port}/",
    "/to-address": "http://127.0.0.1:{port}/picture.png",
    "/to-number": "http://2130706433:{port}/picture.png",
    "/to-metadata": "http://169.254.169.254/latest/meta-data/",
    "/to-other-host": "http://evil.test:{port}/picture.png",
    "/to-file": "file:///etc/passwd",
    "/round": "/round",
}


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of the names above; raises OSError for others."""
    if host not in NAMES:
        raise OSError("no such name")
    return NAMES[host]


class RedirectingSite:
    """A site on loopback with the redirects above and other pages that are no good picture."""

    def __init__(self) -> None:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((PUBLIC, 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Redirects, a page of HTML, or a picture without an end."""
        if (location := PAGES.get(request.path)) is not None:
            request.send_response(302)
            request.send_header("Location", location.format(port=self.port))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(200)
        request.send_header("Content-Type", "text/html" if request.path == "/page" else "image/png")
        request.end_headers()
        try:
            for _ in range(1 if request.path == "/page" else 4096):
                request.wfile.write(bytes(2**20))
        except OSError:
            request.close_connection = True  # the client has read enough

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def network() -> Network:
    """As the server's own, with the names above and one address more."""
    return Network(resolve=resolve, is_allowed=lambda address: address == PUBLIC or is_public(address))


def main() -> int:
    """Serve with that network."""
    from llama_adapter.__main__ import main as serve

    fetching.Network = network  # type: ignore[assignment, misc]
    sys.argv[1:1] = ["serve"]
    return serve()


if __name__ == "__main__":
    sys.exit(main())
