"""The resources that a replica reserves on a cluster, and its share of a machine's memory. Imports no Ray."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.jobs.clusters.places import HOST, Machine, plan_places
from llama_adapter.app.serving.replicas.types import MemoryShare


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
