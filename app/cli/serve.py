"""`serve` and `web`."""

import argparse
from typing import Any

from llama_adapter.app.cli.model_flags import add_batch_size, add_computation, add_model
from llama_adapter.app.cli.parser import Parser, command, default
from llama_adapter.app.cli.values import settings, spec_from
from llama_adapter.app.online.types import ServiceLimits

LIMITS = ServiceLimits()

_SERVE = """\
Answer over HTTP as OpenAI's chat completions do: pictures as data URIs, answers whole or streamed. Requests of all
clients share the engine's batches. SIGTERM answers what was accepted, then ends.

  llama-adapter serve --port 8000
  curl http://127.0.0.1:8000/docs
"""

_WEB = """\
A page to look at pictures and talk about them: chat, yes or no, batches, throughput; the API of `serve` is beside it.
It is for this machine alone unless --host says otherwise, and asks nobody for a password: elsewhere, put a proxy with
one before it.
"""


def add_serving(commands: Any) -> None:
    serve = command(commands, "serve", _run_serve, help="answer over HTTP, as OpenAI does", description=_SERVE)
    _add_server(serve, port=8000)
    web = command(commands, "web", _run_web, help="a page for the browser, and `serve` beside it", description=_WEB)
    _add_server(web, port=7860)


def _add_server(parser: Parser, *, port: int) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help=default("to listen at"))
    group.add_argument("--port", metavar="N", type=int, default=port, help=default("0 takes a free one"))
    group.add_argument(
        "--host-name",
        metavar="NAME",
        dest="host_names",
        action="append",
        default=[],
        help="answer to this host name as well, as behind a proxy; repeat it for more",
    )
    group.add_argument("--max-body-mib", metavar="N", type=int, default=48, help=default("of a request"))
    group.add_argument(
        "--drain-s", metavar="S", type=float, default=60.0, help=default("seconds to answer what is left at the end")
    )
    group.add_argument("--quiet", action="store_true", help="no notes and no line for each request on stderr")
    api = parser.add_argument_group("API")
    api.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="keys to ask for, one a line, in a file that only its owner reads (or in LLAMA_ADAPTER_API_KEY)",
    )
    api.add_argument(
        "--allow-url-host",
        metavar="HOST",
        dest="allowed_hosts",
        action="append",
        default=[],
        help="fetch pictures by https from this host; repeat it for more (default: none are fetched)",
    )
    limits = parser.add_argument_group("limits")
    for name, kind, text in (
        ("max_waiting", int, "requests that wait for a slot; further ones are refused"),
        ("max_waiting_per_client", int, "of them of one client"),
        ("timeout_s", float, "seconds from a request to its whole answer"),
        ("max_pixels", int, "of a picture"),
        ("max_picture_bytes", int, "of a picture's file"),
        ("picture_timeout_s", float, "read timeout per picture, in seconds"),
        (
            "reading_memory_bytes",
            int,
            "bytes of memory to read one picture; 20 per pixel of --max-pixels are enough",
        ),
        ("slow_after_s", float, "processor seconds after which a picture is read apart from others, as a slow one"),
        ("max_slow_pictures", int, "slow pictures that are read at once"),
        ("max_slow_waiting", int, "slow pictures that wait; further ones are refused"),
        ("max_prompt_chars", int, "of a prompt"),
        ("encoded_bytes", int, "of pictures that are kept encoded for further questions"),
    ):
        usual = getattr(LIMITS, name)
        metavar = "S" if kind is float else "N"
        flag = "--" + name.replace("_", "-")
        limits.add_argument(flag, metavar=metavar, type=kind, default=usual, help=default(text))
    add_model(parser)
    compute = parser.add_argument_group("computation")
    add_batch_size(compute)
    add_computation(compute)


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
