"""What a replica reserves of a cluster. Imports no Ray."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.scale.places import Machine, plan_places


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace:
    """The resources of one replica; all replicas of a deployment have the same."""

    device: str  # as in CaptionerSpec
    num_cpus: float
    devices: Mapping[str, float]  # reserved too, by Ray's name of the resource
    threads: int | None  # that it computes with; None: torch's default

    def actor_options(self) -> dict[str, Any]:
        """Ray's options of the replica's actor."""
        others = {name: number for name, number in self.devices.items() if name != "GPU"}
        return {"num_cpus": self.num_cpus, "num_gpus": self.devices.get("GPU", 0), "resources": others}


def plan_replica(machines: Sequence[Machine], *, device: str, replicas: int, flag: str) -> ReplicaPlace:
    """What each of `replicas` reserves: a device, or its share of the processors.

    Raises UsageError, which names the number of replicas by its `flag`, if the cluster lacks the resources.
    """
    places = plan_places(machines, device=device, actors=replicas, flag=flag)
    threads = [place.threads for place in places if place.threads is not None]
    return ReplicaPlace(
        device=places[0].device,
        num_cpus=min(place.num_cpus for place in places),
        devices=places[0].devices,
        threads=_wanted_threads() or (min(threads) if threads else None),
    )


def _wanted_threads() -> int | None:
    """OMP_NUM_THREADS, if the user has set it."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None
