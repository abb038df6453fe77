"""What a replica reserves of a cluster, and its part of a machine that several replicas share. Imports no Ray."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.replicas.types import MemoryShare
from llama_adapter.app.scale.places import HOST, Machine, plan_places


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlace:
    """The resources of one replica; all replicas of a deployment have the same."""

    device: str  # as in CaptionerSpec
    num_cpus: float
    devices: Mapping[str, float]  # reserved too, by Ray's name of the resource, on one machine
    threads: int | None  # that it computes with, on processors all its ranks together; None: torch's default
    num_replicas: Mapping[str, int]  # planned on each machine, by its id

    def actor_options(self) -> dict[str, Any]:
        """Ray's options of the replica's actor."""
        others = {name: number for name, number in self.devices.items() if name != "GPU"}
        return {"num_cpus": self.num_cpus, "num_gpus": self.devices.get("GPU", 0), "resources": others}

    @property
    def most_per_machine(self) -> int | None:
        """So many replicas at most compute in a machine's memory, wherever Ray Serve places them.

        None if they have devices, each with a memory of its own.
        """
        return max(self.num_replicas.values()) if self.device == HOST else None

    @property
    def sharing_memory(self) -> Mapping[str, int]:
        """Machines whose memory several replicas compute in, and how many at most."""
        most = self.most_per_machine or 1
        return dict.fromkeys(self.num_replicas, most) if most > 1 else {}


def plan_replica(machines: Sequence[Machine], *, device: str, replicas: int, flag: str, ranks: int = 1) -> ReplicaPlace:
    """What each of `replicas` reserves: a device for each of its `ranks`, or its share of the processors.

    Raises UsageError, which names the number of replicas by its `flag`, if the cluster lacks the resources.
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


def memory_shares(num_replicas: Mapping[str, int], free_bytes: Mapping[str, int | None]) -> dict[str, MemoryShare]:
    """Equal parts of the free memory of each machine, by its id; none where that is not known."""
    return {
        machine: MemoryShare(num_bytes=free // number, num_replicas=number)
        for machine, number in num_replicas.items()
        if (free := free_bytes.get(machine)) is not None
    }


def _wanted_threads() -> int | None:
    """OMP_NUM_THREADS, if the user has set it: the threads of a process, as a rank is one."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) else None
