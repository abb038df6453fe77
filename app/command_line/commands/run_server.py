"""`serve` and `web`: run a service over HTTP, with or without a page."""

import dataclasses
import importlib
import os
import re
import signal
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

from llama_adapter.app.command_line.doctor.environment import PAGE_PACKAGES, SERVER_PACKAGES
from llama_adapter.app.command_line.doctor.probes import IMPORT_NAMES
from llama_adapter.app.jobs.clusters.cluster import RayOptions
from llama_adapter.app.jobs.wording import EMBEDDED_NOTE
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.base import OnlineService
from llama_adapter.app.serving.online.service import Service, load_warm
from llama_adapter.app.serving.online.types import ServiceLimits
from llama_adapter.app.serving.replicas.types import DeploymentSettings
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.terminal.logs import Log, LogFormat, LogLevel
from llama_adapter.vision.formats import PICTURE_SUFFIXES

if TYPE_CHECKING:
    from llama_adapter.app.serving.http_api.api import ApiSettings
    from llama_adapter.app.serving.http_api.metrics import Metrics
    from llama_adapter.app.serving.web.scores import SavedReport

API_KEY_VARIABLE = "LLAMA_ADAPTER_API_KEY"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeJob:
    """The settings of one server."""

    spec: CaptionerSpec
    limits: ServiceLimits
    has_page: bool
    host: str = "127.0.0.1"
    port: int = 8000
    host_names: tuple[str, ...] = ()  # accepted in addition to `host`
    model_names: tuple[str, ...] = ()  # names of the model for clients, instead of its own
    cors_origins: tuple[str, ...] = ()  # origins of web pages that may call the API
    closed: tuple[str, ...] = ()  # operation paths that are not served: docs, health, metrics
    root_path: str = ""  # at which a proxy offers the server
    allowed_hosts: tuple[str, ...] = ()  # from which pictures may be downloaded
    api_key_file: str | None = None
    max_body_mib: int = 48
    scores: tuple[str, ...] = ()  # folders of `eval` whose reports the page shows
    batch_folder: str | None = None  # None: the API has no files and no batches
    max_file_mib: int = 200
    max_files: int = 1000
    max_files_mib: int = 4096
    drain_s: float = 60.0
    quiet: bool = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    deployment: DeploymentSettings | None = None  # of replicas; None: the model is in this process
    ray: RayOptions = dataclasses.field(default_factory=RayOptions)  # the cluster of the replicas

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is 0 (a free one) to 65535, got {self.port}")
        require_least(self, "max_body_mib", "max_file_mib", "max_files", "max_files_mib")
        require_least(self, "drain_s", least=0)


# Makes the page of a service, and closes what the page holds at the end of the context.
OpenPage = Callable[[Service], AbstractContextManager[Any]]


def run_serve(job: ServeJob, *, open_page: OpenPage | None = None) -> int:
    """Serve until SIGTERM or SIGHUP (drains, exit code 0) or Ctrl-C (drains, 130).

    With `job.has_page`, the page of `open_page` is mounted at the root; by default that of `web`. Uploads go to a
    folder that is removed at the end.

    Raises LlamaAdapterError for problems with the model, the address or the keys, and for missing packages.
    """
    check_packages(has_page=job.has_page)
    from llama_adapter.app.serving.http_api.api import create_api, open_batches
    from llama_adapter.app.serving.http_api.file_store import FileLimits
    from llama_adapter.app.serving.http_api.metrics import Metrics
    from llama_adapter.app.serving.http_api.running import address_of, bind, run

    reports: tuple[SavedReport, ...] = ()
    if job.scores:
        from llama_adapter.app.serving.web.scores import read_report  # imports the page, which `serve` does not need

        reports = tuple(map(read_report, job.scores))
    log = Log(level=job.log_level, log_format=job.log_format, quiet=job.quiet)
    tell = log.tell
    keys = read_api_keys(job.api_key_file)
    settings = api_settings(job, keys=keys)
    if job.has_page and keys:
        tell("note: the API asks for keys, the page does not")
    with ExitStack() as stack:
        # Bound before the model is loaded, which may take minutes, so that an unavailable address fails immediately.
        listener = stack.enter_context(closing(bind(job.host, job.port)))
        address = address_of(listener)
        metrics = Metrics()
        local = None
        if job.deployment is None:
            local = Service(lambda: load_warm(job.spec, tell=tell), limits=job.limits, observer=metrics)
            stack.enter_context(closing(local))
            local.start()
            local.wait_until_ready()
        service = local or stack.enter_context(_opened_replicas(job, address=address, metrics=metrics, tell=tell))
        if job.spec.is_embedded:
            tell(EMBEDDED_NOTE)
        batches = None
        if job.batch_folder is not None:
            limits = FileLimits(
                max_file_bytes=job.max_file_mib * 2**20,
                max_files=job.max_files,
                max_total_bytes=job.max_files_mib * 2**20,
            )
            batches = stack.enter_context(open_batches(job.batch_folder, service, settings=settings, limits=limits))
        application = create_api(service, settings=settings, metrics=metrics, batches=batches)
        if local is not None and job.has_page:
            from llama_adapter.app.serving.web.guards import bounded_uploads
            from llama_adapter.app.serving.web.page import build_page, mount_page
            from llama_adapter.app.serving.web.uploads import private_uploads

            stack.enter_context(private_uploads())
            stack.enter_context(bounded_uploads())
            if open_page is None:
                samples = sorted(path for path in sample_pictures().iterdir() if path.suffix in PICTURE_SUFFIXES)
                page = build_page(local, samples=samples, reports=reports)
            else:
                page = stack.enter_context(open_page(local))
            mount_page(application, page, local)
        ended_by = run(
            application,
            listener=listener,
            service=service,
            drain_s=job.drain_s,
            tell=tell,
            # Printed even with `quiet`: with port 0, only this message tells the port.
            on_start=lambda: log.announce(f"serving on {address}"),
        )
    return ExitCode.INTERRUPTED if ended_by == signal.SIGINT else ExitCode.OK


@contextmanager
def _opened_replicas(
    job: ServeJob, *, address: str, metrics: "Metrics", tell: Callable[[str], None]
) -> Iterator[OnlineService]:
    """A service over replicas, once it is ready. The name of the Ray Serve application contains host and port."""
    from llama_adapter.app.serving.replicas.deployment import open_replicas

    assert job.deployment is not None, "the job asks for replicas"
    name = f"{job.deployment.name}-{socket.gethostname()}-{address.rpartition(':')[2]}"
    deployment = dataclasses.replace(job.deployment, name=name)
    with open_replicas(
        deployment, spec=job.spec, limits=job.limits, ray=job.ray, observer=metrics, tell=tell
    ) as service:
        metrics.watch_replicas(service.replica_metrics)
        yield service


def check_packages(*, has_page: bool, command: str = "") -> None:
    """Raise UsageError if packages of the extra are missing. `command` is that of the message, if not the extra's."""
    for name in (*SERVER_PACKAGES, *(PAGE_PACKAGES if has_page else ())):
        try:
            importlib.import_module(IMPORT_NAMES.get(name, name))
        except ImportError as error:
            extra = "web" if has_page else "serve"
            raise UsageError(
                f"`llama-adapter {command or extra}` needs the package {name}, which cannot be imported: {error}",
                hint=install_hint(extra),
            ) from None


def api_settings(job: ServeJob, *, keys: Mapping[str, str]) -> "ApiSettings":
    """The API's settings; raises UsageError for invalid hosts and origins."""
    from llama_adapter.app.serving.http_api.api import ApiSettings
    from llama_adapter.app.serving.http_api.guards import GuardSettings, host_names_for
    from llama_adapter.app.serving.http_api.pictures import PictureSettings

    try:
        return ApiSettings(
            model_names=job.model_names,
            pictures=PictureSettings(
                max_picture_bytes=job.limits.max_picture_bytes, allowed_hosts=tuple(job.allowed_hosts)
            ),
            guards=GuardSettings(
                max_body_bytes=job.max_body_mib * 2**20,
                max_bytes_under_way=max(GuardSettings().max_bytes_under_way, 2 * job.max_body_mib * 2**20),
                host_names=host_names_for(job.host, more=job.host_names),
                api_keys=tuple(keys),
                key_names=tuple(keys.values()),
                cors_origins=job.cors_origins,
                closed=job.closed,
                root_path=job.root_path,
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_api_keys(path: str | None) -> dict[str, str]:
    """The API keys of the environment variable and of a file, with their names for the log.

    A line of the file is a key, and its name if there is one: `KEY NAME`. Raises UsageError for a file that other users
    can read or that has no keys, and OSError.
    """
    keys = dict.fromkeys(os.environ.get(API_KEY_VARIABLE, "").split(), "")
    if path is not None:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise UsageError(f"The key file `{path}` is readable by others", hint=f"chmod 600 {path}")
            found = [line.split(maxsplit=1) for line in file if line.strip() and not line.startswith("#")]
        if not found:
            raise UsageError(f"There is no key in `{path}`", hint="write one per line")
        keys |= {key: "".join(name).strip() for key, *name in found}
    if any(not re.fullmatch(r"[\x21-\x7e]{8,}", key) for key in keys):
        raise UsageError("A key must have at least 8 characters, ASCII without spaces")
    return {key: name or f"key {number}" for number, (key, name) in enumerate(keys.items(), start=1)}
