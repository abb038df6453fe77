"""`serve` and `web`."""

import argparse
from typing import Any

from llama_adapter.app.cli.model_flags import add_computation, add_model, with_batch_size
from llama_adapter.app.cli.parser import Parser, command, default
from llama_adapter.app.cli.values import settings, spec_from
from llama_adapter.app.online.types import ServiceLimits

LIMITS = ServiceLimits()

_SERVE = """\
An HTTP server with OpenAI's chat completions API: pictures as data URIs, answers whole or streamed. Requests of all
clients share the engine's batches. On SIGTERM, accepted requests are answered before the server ends.

  llama-adapter serve --port 8000
  curl http://127.0.0.1:8000/docs
"""

_WEB = """\
A web page for questions about pictures, batches and throughput, and the API of `serve` on the same port. It listens
on this machine only unless --host says otherwise, and has no password: elsewhere, put a proxy with authentication in
front of it.
"""


def add_serving(commands: Any) -> None:
    serve = command(commands, "serve", _run_serve, help="HTTP server with OpenAI's API", description=_SERVE)
    _add_server(serve, port=8000)
    web = command(commands, "web", _run_web, help="web page, with the API of `serve`", description=_WEB)
    _add_server(web, port=7860)


def _add_server(parser: Parser, *, port: int) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=default("address to listen at"))
    group.add_argument("--port", metavar="N", type=int, default=port, help=default("port; 0 takes a free one"))
    group.add_argument(
        "--host-name",
        metavar="NAME",
        dest="host_names",
        action="append",
        default=[],
        help="further host name to answer to, for example behind a proxy; may be repeated",
    )
    group.add_argument(
        "--max-body-mib", metavar="N", type=int, default=48, help=default("size limit of a request, in MiB")
    )
    group.add_argument(
        "--drain-s",
        metavar="S",
        type=float,
        default=60.0,
        help=default("time to answer accepted requests at the end, in seconds"),
    )
    group.add_argument("--quiet", action="store_true", help="no notes and no access log on stderr")
    api = parser.add_argument_group("API")
    api.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="accepted API keys, one per line; the file must be readable by its owner only (or LLAMA_ADAPTER_API_KEY)",
    )
    api.add_argument(
        "--allow-url-host",
        metavar="HOST",
        dest="allowed_hosts",
        action="append",
        default=[],
        help="host to fetch pictures from by https; may be repeated (default: none)",
    )
    limits = parser.add_argument_group("limits", "requests above them are refused")
    for name, kind, text in (
        ("max_waiting", int, "waiting requests"),
        ("max_waiting_per_client", int, "waiting requests per client"),
        ("timeout_s", float, "time limit of a request, in seconds"),
        ("max_pixels", int, "pixels of a picture"),
        ("max_picture_bytes", int, "bytes of a picture file"),
        ("picture_timeout_s", float, "read timeout per picture, in seconds"),
        ("reading_memory_bytes", int, "bytes of memory per picture while it is read; 20 per pixel are enough"),
        ("slow_after_s", float, "CPU seconds after which a picture moves to the slow lane"),
        ("max_slow_pictures", int, "slow pictures read at once"),
        ("max_slow_waiting", int, "waiting slow pictures"),
        ("max_prompt_chars", int, "characters of a prompt"),
        ("encoded_bytes", int, "bytes of the cache of encoded pictures"),
    ):
        usual = getattr(LIMITS, name)
        metavar = "S" if kind is float else "N"
        flag = "--" + name.replace("_", "-")
        limits.add_argument(flag, metavar=metavar, type=kind, default=usual, help=default(text))
    add_model(parser)
    add_computation(with_batch_size(parser))


def _run_serve(options: argparse.Namespace) -> int:
    return _serve(options, has_page=False)


def _run_web(options: argparse.Namespace) -> int:
    return _serve(options, has_page=True)


def _serve(options: argparse.Namespace, *, has_page: bool) -> int:
    spec = spec_from(options)
    limits = settings(ServiceLimits, vars(options))
    from llama_adapter.app.cli.run_server import ServeJob, run_serve

    values = {
        **vars(options),
        "host_names": tuple(options.host_names),
        "allowed_hosts": tuple(options.allowed_hosts),
    }
    return run_serve(settings(ServeJob, {**values, "spec": spec, "limits": limits, "has_page": has_page}))
