"""Opens a service over replicas, which Ray Serve starts and ends. Imports Ray inside functions only.

Ray Serve places, routes, checks, restarts and scales replicas. Its HTTP proxies stay off: the command itself listens,
because requests are routed by the digest of their picture.
"""

import os
import textwrap
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llama_adapter.app.captioning.tasks.answers import Event
from llama_adapter.app.jobs.clusters.cluster import (
    RayOptions,
    WorkersFailedError,
    free_bytes_of,
    joined_cluster,
    machines,
    raise_problem,
)
from llama_adapter.app.jobs.clusters.drive import check_alike
from llama_adapter.app.jobs.clusters.places import HOST, Machine, plan_places
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.types import Observer, ServiceLimits
from llama_adapter.app.serving.replicas.replica import Replica, problem_in
from llama_adapter.app.serving.replicas.service import ReplicatedService
from llama_adapter.app.serving.replicas.types import (
    DeploymentSettings,
    MemoryShare,
    ReplicaLostError,
    ReplicaReport,
    ReplicaSettings,
)
from llama_adapter.runtime.child_process import last_line

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_MOST_AUTO_ROWS = 64  # assumed batch size if it is determined only when the model is loaded
_HEALTH_CHECK_PERIOD_S = 1.0  # how often Ray Serve checks whether a replica has ended
_CHECK_S = 0.5  # how often the state of loading replicas is checked
_REPORT_S = 5.0  # timeout for the replicas' reports and metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace:
    """The resources of one replica. All replicas of a deployment have the same resources."""

    device: str  # as in CaptionerSpec
    num_cpus: float
    devices: Mapping[str, float]  # devices to reserve on one machine: Ray's name of the resource -> number
    threads: int | None  # compute threads; on a CPU, those of all its ranks together; None: torch's default
    num_replicas: Mapping[str, int]  # id of a machine -> number of replicas planned there

    def actor_options(self) -> dict[str, Any]:
        """Ray's options of the replica's actor."""
        others = {name: number for name, number in self.devices.items() if name != "GPU"}
        return {"num_cpus": self.num_cpus, "num_gpus": self.devices.get("GPU", 0), "resources": others}

    @property
    def most_per_machine(self) -> int | None:
        """The most replicas on one machine, wherever Ray Serve places them, because they share its memory.

        None if they use devices, which have their own memory.
        """
        return max(self.num_replicas.values()) if self.device == HOST else None

    def memory_shares(self, free_bytes_of: Callable[[list[str]], Mapping[str, int | None]]) -> dict[str, MemoryShare]:
        """Id of a machine -> a replica's share of its free memory, as `free_bytes_of` measures it.

        Empty if every replica has a machine or devices of its own. Machines whose free memory is unknown are left out.
        """
        if (most := self.most_per_machine or 1) == 1:
            return {}
        free_bytes = free_bytes_of(list(self.num_replicas))
        return {
            machine: MemoryShare(num_bytes=free // most, num_replicas=most)
            for machine in self.num_replicas
            if (free := free_bytes.get(machine)) is not None
        }


def plan_replica(machines: Sequence[Machine], *, device: str, replicas: int, flag: str, ranks: int = 1) -> ReplicaPlace:
    """The resources of each of `replicas` replicas: a device for each of its `ranks`, or its share of the CPU cores.

    Raises UsageError if the cluster lacks the resources. `flag` is the command-line flag for the number of replicas,
    which the message names.
    """
    places = plan_places(machines, device=device, actors=replicas, flag=flag, ranks=ranks)
    threads = [place.threads for place in places if place.threads is not None]
    device = places[0].device
    wanted = _wanted_threads()
    if wanted is not None and device == HOST:
        wanted *= ranks
    return ReplicaPlace(
        device=device,
        num_cpus=min(place.num_cpus for place in places),
        devices=places[0].devices,
        threads=wanted or (min(threads) if threads else None),
        num_replicas=Counter(place.machine for place in places),
    )


def _wanted_threads() -> int | None:
    """OMP_NUM_THREADS if the user has set it: the number of threads of one process, that is of one rank."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None


class ServeReplicas:
    """The replicas of a Ray Serve deployment, used through its handle. Implements `types.Replicas`."""

    def __init__(self, handle: Any, *, max_ongoing_requests: int) -> None:
        self.max_ongoing_requests = max_ongoing_requests
        self._handle = handle
        self._answering = handle.options(method_name="answer", stream=True)

    async def ask(self, ask: Ask, *, session: str) -> AsyncIterator[Sequence[Event]]:
        import ray
        from ray.serve.exceptions import RayServeException

        response = self._answering.options(session_id=session).remote(ask)
        is_done = False
        try:
            async for group in response:
                yield group
            is_done = True
        except (ray.exceptions.RayActorError, RayServeException) as error:
            is_done = True
            raise ReplicaLostError(textwrap.shorten(last_line(str(error)), 200)) from error
        finally:
            if not is_done:
                response.cancel()

    async def reports(self) -> Sequence[ReplicaReport]:
        return [came for came in await self._all("report") if isinstance(came, ReplicaReport)]

    async def metrics(self) -> "Mapping[str, Sequence[Metric]]":
        return dict(came for came in await self._all("metrics") if isinstance(came, tuple))

    async def _all(self, method: str) -> Sequence[Any]:
        """Call a method on all replicas; returns the results, with an exception for each replica that has ended."""
        from ray.serve.exceptions import DeploymentUnavailableError

        with suppress(DeploymentUnavailableError):  # there are no replicas
            found: Sequence[Any] = await self._handle.broadcast(method).results_async(
                timeout_s=_REPORT_S, return_exceptions=True
            )
            return found
        return ()


def max_ongoing_requests(spec: CaptionerSpec) -> int:
    """The number of requests that one replica takes: a batch that it answers, and a batch that it reads meanwhile."""
    return 2 * (_MOST_AUTO_ROWS if spec.batch_size == AUTO else spec.batch_size)


@contextmanager
def deployed(
    settings: DeploymentSettings, replica: ReplicaSettings, place: ReplicaPlace, *, tell: Callable[[str], None]
) -> Iterator[ServeReplicas]:
    """Inside this context, replicas run on the cluster that this process has joined. At its end they are removed.

    Raises the error of a replica that cannot load the model, and WorkersFailedError if a replica ends while it loads.
    """
    from ray import serve

    was_running = bool(serve.status().applications)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
    most = max_ongoing_requests(replica.spec)
    options = deployment_options(settings, place, max_ongoing_requests=most)
    application = serve.deployment(**options)(Replica).bind(replica)
    try:
        handle = _wait_until_running(application, settings, tell=tell)
        yield ServeReplicas(handle, max_ongoing_requests=most)
    finally:
        with suppress(Exception):  # the cluster may be gone; the original error says more
            serve.delete(settings.name)
            if not was_running and not serve.status().applications:
                serve.shutdown()  # type: ignore[no-untyped-call]


def deployment_options(
    settings: DeploymentSettings, place: ReplicaPlace, *, max_ongoing_requests: int
) -> dict[str, Any]:
    """The options of Ray Serve's deployment."""
    from ray.serve.config import RequestRouterConfig

    # If a replica is full, the next one on the hash ring gets the request; all replicas are tried.
    router: dict[str, Any] = {
        "request_router_class": _ROUTER,
        "request_router_kwargs": {"num_fallback_replicas": settings.most - 1},
    }
    number: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.most > settings.replicas:
        scaling = {
            "min_replicas": settings.replicas,
            "max_replicas": settings.most,
            "target_ongoing_requests": max(1, max_ongoing_requests // 2),
            "upscale_delay_s": settings.upscale_delay_s,
            "downscale_delay_s": settings.downscale_delay_s,
        }
        number = {"autoscaling_config": scaling}
    return {
        "name": "Replica",
        **number,
        "ray_actor_options": place.actor_options(),
        "max_replicas_per_node": place.most_per_machine,
        "request_router_config": RequestRouterConfig(**router),
        "max_ongoing_requests": max_ongoing_requests,
        "max_constructor_retry_count": 1,  # an error while loading is shown at once
        "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": max(1.0, settings.graceful_shutdown_timeout_s),
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
    }


def _wait_until_running(application: Any, settings: DeploymentSettings, *, tell: Callable[[str], None]) -> Any:
    """Start the application and wait until its replicas have loaded their model; returns its handle."""
    from ray import serve

    handle: Future[Any] = Future()

    def run() -> None:
        try:
            handle.set_result(serve.run(application, name=settings.name, route_prefix=None))
        except BaseException as error:
            handle.set_exception(error)

    threading.Thread(target=run, name="deploy", daemon=True).start()
    shown = ""
    while True:
        with suppress(TimeoutError):
            try:
                return handle.result(_CHECK_S)
            except RuntimeError as error:  # it only names the application; the status of its deployment has the reason
                _raise_not_loaded(f"{error}\n{_message(serve.status(), settings.name)}", settings)
        message = _message(serve.status(), settings.name)
        if "failed to start" in message:
            _raise_not_loaded(message, settings)
        if "to be scheduled" in message and message != shown:
            shown = message
            tell("note: replicas wait for free resources or for their processes; `ray status` shows which")


def _message(status: Any, name: str) -> str:
    """Ray Serve's message about an application's deployment."""
    application = status.applications.get(name)
    deployments = application.deployments.values() if application is not None else ()
    return " ".join(str(deployment.message) for deployment in deployments)


def _raise_not_loaded(message: str, settings: DeploymentSettings) -> None:
    found = problem_in(message)
    if found is not None:
        raise_problem(found[1], host=found[0])
    number = "a replica" if settings.replicas == 1 else f"{settings.replicas} replicas"
    raise WorkersFailedError(
        f"The process of a replica ended while it loaded the model: {textwrap.shorten(last_line(message), 160)}",
        hint=f"a machine may have too little memory for {number}: pass a smaller --replicas or --batch-size, or add "
        "machines; the logs of Ray say more",
    )


@contextmanager
def open_replicas(
    deployment: DeploymentSettings,
    *,
    spec: CaptionerSpec,
    limits: ServiceLimits,
    ray: RayOptions,
    observer: Observer,
    tell: Callable[[str], None],
) -> Iterator[ReplicatedService]:
    """A service that is ready. At the end of the context, its replicas and a cluster that it started are removed.

    Raises UsageError if Ray Serve is missing or there are too few devices, WorkersFailedError, and the errors of
    loading the model.
    """
    with joined_cluster(ray, package="ray.serve", extra="replicas") as where:
        flag = "--replicas" if deployment.max_replicas is None else "--max-replicas"
        ranks = spec.tensor_parallel
        place = plan_replica(machines(), device=spec.device, replicas=deployment.most, flag=flag, ranks=ranks)
        tell(f"{where}, {_described(deployment, ranks=ranks)}")
        replica = ReplicaSettings(
            spec=replace(spec, device=place.device),
            limits=limits,
            folder=os.getcwd(),
            threads=place.threads,
            # Shares of the memory that is free before the first replica loads. Later, the free memory depends on which
            # replicas have loaded.
            memory=place.memory_shares(free_bytes_of),
        )
        with (
            deployed(deployment, replica, place, tell=tell) as replicas,
            closing(ReplicatedService(replicas, limits=limits, observer=observer)) as service,
        ):
            service.start()
            service.wait_until_ready(60.0)
            first, *others = service.replicas()
            for other in others:
                check_alike(other.info, first.info, hosts=(other.host, first.host))
            for note in first.info.notes:
                tell(f"note: {note}")
            yield service


def _described(deployment: DeploymentSettings, *, ranks: int) -> str:
    number = "1 replica" if deployment.replicas == 1 else f"{deployment.replicas} replicas"
    most = f" to {deployment.most}" if deployment.most > deployment.replicas else ""
    return number + most + (f" of {ranks} ranks" if ranks > 1 else "")
