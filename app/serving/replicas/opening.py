"""Opens a service over replicas from its settings: cluster, deployment, service."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from llama_adapter.app.jobs.clusters.cluster import RayOptions, free_bytes_of, joined_cluster, machines
from llama_adapter.app.jobs.clusters.drive import check_alike
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.types import Observer, ServiceLimits
from llama_adapter.app.serving.replicas.deployment import deployed
from llama_adapter.app.serving.replicas.placement import memory_shares, plan_replica
from llama_adapter.app.serving.replicas.service import ReplicatedService
from llama_adapter.app.serving.replicas.types import DeploymentSettings, ReplicaSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicatedSettings:
    """The settings of a service over replicas."""

    spec: CaptionerSpec
    limits: ServiceLimits
    ray: RayOptions
    deployment: DeploymentSettings


@contextmanager
def open_replicas(
    settings: ReplicatedSettings, *, observer: Observer, tell: Callable[[str], None]
) -> Iterator[ReplicatedService]:
    """A service that is ready. At the end of the context, its replicas and a cluster that it started are removed.

    Raises UsageError if Ray Serve is missing or there are too few devices, WorkersFailedError, and the errors of
    loading the model.
    """
    deployment, spec = settings.deployment, settings.spec
    with joined_cluster(settings.ray, package="ray.serve", extra="replicas") as where:
        flag = "--replicas" if deployment.max_replicas is None else "--max-replicas"
        ranks = spec.tensor_parallel
        place = plan_replica(machines(), device=spec.device, replicas=deployment.most, flag=flag, ranks=ranks)
        tell(f"{where}, {_described(deployment, ranks=ranks)}")
        shared = place.sharing_memory
        replica = ReplicaSettings(
            spec=replace(spec, device=place.device),
            limits=settings.limits,
            folder=os.getcwd(),
            threads=place.threads,
            # Shares of the memory that is free before the first replica loads. Later, the free memory depends on which
            # replicas have loaded.
            memory=memory_shares(shared, free_bytes_of(list(shared))),
        )
        with (
            deployed(deployment, replica, place, tell=tell) as replicas,
            closing(ReplicatedService(replicas, limits=settings.limits, observer=observer)) as service,
        ):
            service.start()
            service.wait_until_ready(60.0)
            first, *others = service.replicas()
            for other in others:
                check_alike(other, first)
            for note in first.info.notes:
                tell(f"note: {note}")
            yield service


def _described(deployment: DeploymentSettings, *, ranks: int) -> str:
    number = "1 replica" if deployment.replicas == 1 else f"{deployment.replicas} replicas"
    most = f" to {deployment.most}" if deployment.most > deployment.replicas else ""
    return number + most + (f" of {ranks} ranks" if ranks > 1 else "")
