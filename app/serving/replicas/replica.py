"""One replica: a service with its own copy of the model. It is the class that Ray Serve deploys."""

import asyncio
import base64
import dataclasses
import importlib
import json
import logging
import os
import re
import socket
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.answers import Answer, Event
from llama_adapter.app.jobs.clusters.places import HOST
from llama_adapter.app.jobs.clusters.reading import enter_folder
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.http_api.errors import of_refusal
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.service import Service, load_warm
from llama_adapter.app.serving.replicas.types import MemoryShare, ReplicaReport, ReplicaSettings
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, TooLittleMemoryError
from llama_adapter.runtime.host_memory import plan_with
from llama_adapter.runtime.problems import Problem, describe

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger("llama_adapter.service")
_MARK = re.compile(r"\[problem:([A-Za-z0-9+/=]+)\]")
_PAUSE_S = 0.02  # pieces of this time are sent together: a message of Ray takes about as long as a short decode step


class NotLoadedError(Exception):
    """A replica could not load its model. Ray Serve passes errors on as text, so the text has the whole problem."""

    def __init__(self, problem: Problem, *, host: str) -> None:
        packed = json.dumps([host, dataclasses.asdict(problem)]).encode()
        super().__init__(f"{problem.sentence} [problem:{base64.b64encode(packed).decode()}]")


def problem_in(text: str) -> tuple[str, Problem] | None:
    """Host and problem of a `NotLoadedError` whose text is somewhere in `text`; None if there is none."""
    found = _MARK.search(text)
    if found is None:
        return None
    host, fields = json.loads(base64.b64decode(found[1]))
    fields |= {"exit_code": ExitCode(fields["exit_code"]), "details": tuple(fields["details"])}
    return host, Problem(**fields)


def _listen_on_own_address() -> None:
    """Let Ray Serve, which listens on all interfaces, listen on the address that the cluster knows this machine by.

    Ray Serve has no setting for it. It opens the port of a replica after its constructor.
    """
    network, util, replica = (
        importlib.import_module(f"ray.{name}") for name in ("_common.network_utils", "util", "serve._private.replica")
    )
    place, bind = network.build_address(util.get_node_ip_address(), 0), replica.add_port_to_grpc_server
    replica.__dict__["add_port_to_grpc_server"] = lambda server, _: bind(server, place)


class Replica:
    """Loads the model, and answers requests with it until it is deleted."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Raises NotLoadedError."""
        import ray
        from ray import serve

        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._settings, self._has_loaded = settings, False
        # Ray Serve redirects sys.stderr to its own log at a level that is dropped, so its log handlers are used.
        logging.getLogger("llama_adapter").handlers[:] = logging.getLogger("ray.serve").handlers
        enter_folder(settings.folder)
        _listen_on_own_address()
        if settings.threads is not None and settings.spec.decoder is None:
            from llama_adapter.app.models.parallel.cores import compute_with  # imports torch

            ranks_here = settings.spec.tensor_parallel if settings.spec.device == HOST else 1
            self._cores = compute_with(settings.threads, ranks=ranks_here)
        share = settings.memory.get(ray.get_runtime_context().get_node_id())
        if share is not None:
            plan_with(share.num_bytes)
        self._metrics = Metrics()
        self._service = Service(self._load, limits=settings.limits, observer=self._metrics)
        self._metrics.watch(self._service)
        self._service.start()
        try:
            self._service.wait_until_ready()
            self._spec, self._info = self._service.spec, self._service.info
        except Exception as error:
            self._service.close()
            raise NotLoadedError(not_loaded(error, share), host=socket.gethostname()) from None

    def _load(self) -> Captioner:
        """Load the model. With several ranks this works once per process: to load again, the replica ends.

        Ray Serve then starts a new replica, whose ranks are new processes.
        """
        if self._has_loaded and self._settings.spec.tensor_parallel > 1:
            _log.error("this replica ends with its ranks; Ray Serve starts another one")
            os._exit(ExitCode.FAILED)
        captioner = load_warm(self._settings.spec, tell=lambda text: None)
        self._has_loaded = True
        return captioner

    async def answer(self, ask: Ask) -> AsyncGenerator[list[Event]]:
        """The events of a request, in groups. The last event is the answer; a refused request has one too."""
        try:
            handle = await asyncio.to_thread(self._service.submit, ask)  # may tokenise a long text
        except (LlamaAdapterError, ValueError) as error:
            refusal = of_refusal(error)
            yield [Answer.failed(AnswerError(code=refusal.code, message=refusal.message), picture=ask.label)]
            return
        try:
            if not ask.with_pieces:
                yield [await handle.answer()]
                return
            async for group in handle.groups(pause_s=_PAUSE_S):
                yield group
        finally:
            handle.cancel()  # has no effect on an answered request

    async def report(self) -> ReplicaReport:
        """The state of this replica."""
        return ReplicaReport(
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            spec=self._spec,
            info=self._info,
            status=self._service.status(),
        )

    async def metrics(self) -> "tuple[str, list[Metric]]":
        """The name of this replica and its metrics."""
        return self._name, self._metrics.families()

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine is stalled or has ended. Ray Serve then replaces this replica."""
        status = self._service.status()
        if status.is_stalled or status.state == "failed":
            raise RuntimeError(f"The service is {'stalled' if status.is_stalled else status.state}")

    def __del__(self) -> None:
        """Called by Ray Serve once all requests are answered."""
        if hasattr(self, "_service"):
            self._service.close()


def not_loaded(error: Exception, share: MemoryShare | None) -> Problem:
    """Why the model is not loaded. If replicas share the machine's memory, the message says so."""
    problem = describe(error)
    if share is None or not isinstance(error, TooLittleMemoryError):
        return problem
    return dataclasses.replace(
        problem,
        sentence=f"{problem.sentence} for each of {share.num_replicas} replicas on this machine",
        hint=f"{problem.hint}; or fewer replicas by --replicas or --max-replicas, or more machines",
    )
