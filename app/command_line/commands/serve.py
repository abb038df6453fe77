"""`serve` and `web`."""

import argparse
from functools import partial
from typing import Any

from llama_adapter.app.command_line.model_flags import add_batch_size, add_cluster, add_computation, add_model
from llama_adapter.app.command_line.parser import Parser, command, default
from llama_adapter.app.command_line.values import settings, spec_from
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.logs import LOG_FORMATS, LOG_LEVELS

_SERVE = """\
Serve OpenAI's chat completions and responses API: pictures as data URIs, answers complete or streamed. The requests of
all clients share the engine's batches. After SIGTERM, accepted requests are finished.

  llama-adapter serve --port 8000
  curl http://127.0.0.1:8000/docs
"""

_WEB = """\
Serve a page with chat, batches and throughput, and the API of `serve`. It listens on this machine only,
unless --host is given, and has no password: use a proxy that asks for one.
"""


def add_serving(commands: Any) -> None:
    for name, has_page, port, text, description in (
        ("serve", False, 8000, "serve an OpenAI-compatible HTTP API", _SERVE),
        ("web", True, 7860, "serve a page for the browser, and the API", _WEB),
    ):
        run, declare = partial(_serve, has_page=has_page), partial(_declare, port=port, has_replicas=not has_page)
        command(commands, name, run, declare=declare, help=text, description=description)


def _declare(parser: Parser, *, port: int, has_replicas: bool) -> None:
    from llama_adapter.app.serving.online.types import ServiceLimits

    usual_limits = ServiceLimits()
    group = parser.add_argument_group("server", section="server")
    group.add_argument(
        "--host", metavar="ADDRESS", first=True, default="127.0.0.1", help=default("address to listen at")
    )
    group.add_argument(
        "--port", metavar="N", type=int, first=True, default=port, help=default("port; 0 takes a free one")
    )
    group.add_argument(
        "--host-name",
        metavar="NAME",
        dest="host_names",
        action="append",
        default=[],
        help="additional host name, for use behind a proxy; may be repeated",
    )
    group.add_argument(
        "--max-body-mib", metavar="N", type=int, default=48, help=default("size limit of a request, in MiB")
    )
    group.add_argument(
        "--drain-s",
        metavar="S",
        type=float,
        default=60.0,
        help=default("time to finish accepted requests at shutdown, in seconds"),
    )
    group.add_argument("--quiet", section="output", action="store_true", help="no notes and no access log on stderr")
    group.add_argument(
        "--log-level",
        section="output",
        choices=LOG_LEVELS,
        default="info",
        help=default("least level of the log on stderr; debug has requests of the page for its files too"),
    )
    group.add_argument(
        "--log-format", section="output", choices=LOG_FORMATS, default="text", help=default("format of the log")
    )
    api = parser.add_argument_group("API", section="server")
    api.add_argument(
        "--api-key-file",
        first=True,
        metavar="FILE",
        help="API keys, one per line with a name for the log after it, in a file that only its owner can read (or keys "
        "in LLAMA_ADAPTER_API_KEY)",
    )
    api.add_argument(
        "--served-model-name",
        metavar="NAME",
        dest="model_names",
        action="append",
        default=[],
        help="name of the model for clients, instead of its own; may be repeated",
    )
    api.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        dest="cors_origins",
        action="append",
        default=[],
        help="web pages that may call the API, such as https://example.com, or * for any; may be repeated",
    )
    api.add_argument(
        "--root-path",
        metavar="PATH",
        default="",
        help="path at which a proxy offers the server, such as /pictures (default: none)",
    )
    api.add_argument(
        "--close",
        metavar="NAME",
        dest="closed",
        action="append",
        default=[],
        choices=("docs", "health", "metrics"),
        help="answer 404 at /docs, /health or /metrics; may be repeated",
    )
    api.add_argument(
        "--allow-url-host",
        metavar="HOST",
        dest="allowed_hosts",
        action="append",
        default=[],
        help="fetch pictures by https from this host; may be repeated (default: none)",
    )
    batches = parser.add_argument_group(
        "batches", "OpenAI's files and batches; without a folder, they are off", section="server"
    )
    batches.add_argument(
        "--batch-folder",
        metavar="FOLDER",
        help="keep files and batches in this private folder; unfinished batches in it are continued",
    )
    for name, usual, text in (
        ("max_file_mib", 200, "size of an uploaded file, in MiB"),
        ("max_files", 1000, "number of kept files; more uploads are refused"),
        ("max_files_mib", 4096, "size of all files and the answers of unfinished batches, in MiB"),
    ):
        flag = "--" + name.replace("_", "-")
        batches.add_argument(flag, metavar="N", type=int, default=usual, help=default(text))
    limits = parser.add_argument_group("limits", "requests above them are refused", section="server")
    for name, kind, text in (
        ("max_waiting", int, "requests in the queue; more are refused"),
        ("max_waiting_per_client", int, "requests of one client in the queue"),
        ("timeout_s", float, "time from a request to its complete answer, in seconds"),
        ("max_pixels", int, "pixels of a picture"),
        ("max_picture_bytes", int, "bytes of a picture file"),
        ("picture_timeout_s", float, "read timeout per picture, in seconds"),
        (
            "reading_memory_bytes",
            int,
            "bytes of memory to read one picture; 20 per pixel of --max-pixels are enough",
        ),
        ("slow_after_s", float, "processor seconds to read a picture after which it counts as slow"),
        ("max_slow_pictures", int, "slow pictures read at once"),
        ("max_slow_waiting", int, "waiting slow pictures; more are refused"),
        ("max_prompt_chars", int, "characters of a prompt"),
        ("encoded_bytes", int, "bytes of the cache of encoded pictures, reused for further questions"),
    ):
        usual = getattr(usual_limits, name)
        metavar = "S" if kind is float else "N"
        flag = "--" + name.replace("_", "-")
        section = "input" if name == "picture_timeout_s" else "server"  # the same section as for `caption`
        limits.add_argument(flag, section=section, metavar=metavar, type=kind, default=usual, help=default(text))
    if has_replicas:
        _add_replicas(parser)
    else:
        _add_reports(parser)
    add_model(parser)
    compute = parser.add_argument_group("computation", section="computation")
    add_batch_size(compute)
    add_computation(compute)


def _add_reports(parser: Parser) -> None:
    parser.add_argument_group("page", section="page").add_argument(
        "--scores",
        metavar="FOLDER",
        action="append",
        default=[],
        help="show the report in the --out folder of `eval` in a tab Scores; may be repeated",
    )


def _add_replicas(parser: Parser) -> None:
    group = parser.add_argument_group("replicas (extra `replicas`)", section="parallel")
    add_cluster(group, ray="runs the model in replicas on a cluster; this process listens, queues and routes")
    group.add_argument("--replicas", metavar="N", type=int, help="number of replicas (default: 1)")
    group.add_argument(
        "--max-replicas",
        metavar="N",
        type=int,
        help="maximum number of replicas: their number follows the load, from --replicas up (default: it is fixed)",
    )


def _serve(options: argparse.Namespace, *, has_page: bool) -> int:
    spec = spec_from(options, sees_pictures=False)  # LLaMA without an adapter can be served too
    from llama_adapter.app.command_line.commands.run_server import ServeJob, run_serve
    from llama_adapter.app.serving.online.types import ServiceLimits

    limits = settings(ServiceLimits, vars(options))

    lists = ("host_names", "model_names", "cors_origins", "closed", "allowed_hosts", *(("scores",) if has_page else ()))
    values = {**vars(options), **{name: tuple(getattr(options, name)) for name in lists}}
    more = {} if has_page else _replicas(options)
    return run_serve(settings(ServeJob, {**values, "spec": spec, "limits": limits, "has_page": has_page, **more}))


def _replicas(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a job that place the model on a cluster; empty if the model is in this process."""
    from llama_adapter.app.jobs.clusters.cluster import RayOptions
    from llama_adapter.app.serving.replicas.types import DeploymentSettings

    given = {name: vars(options)[name] for name in ("replicas", "max_replicas") if vars(options)[name] is not None}
    if options.engine != "ray":
        if given or options.ray_address is not None:
            raise UsageError(
                "--replicas, --max-replicas and --ray-address go with --engine ray, which is missing",
                hint="one process answers without it",
            )
        return {}
    deployment = {**given, "graceful_shutdown_timeout_s": options.drain_s, "effective": options.effective}
    ray = {"address": options.ray_address, "effective": options.effective}
    return {
        "deployment": settings(DeploymentSettings, deployment),
        "ray": settings(RayOptions, ray, shown={"address": "--ray-address"}),
    }
