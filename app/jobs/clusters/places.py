"""Assigns captioners to the devices of a cluster: one for each device, on its machine. Imports no Ray."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_adapter.runtime.device_names import RAY_NAMES
from llama_adapter.runtime.errors import UsageError

HOST = "cpu"
READING_CPUS = 0.5  # reserved by a reading task: small, so that it fits next to a captioner


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine of the cluster, with its resources such as CPU and GPU."""

    id: str
    resources: Mapping[str, float]

    def count(self, resource: str) -> int:
        """The number of whole units of a resource."""
        return int(self.resources.get(resource, 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The machine and device of one captioner, and the resources that it reserves."""

    machine: str
    device: str  # as in CaptionerSpec
    num_cpus: float
    devices: Mapping[str, float]  # reserved devices, by Ray's name of the resource
    threads: int | None  # number of compute threads; None: torch's default


def resource_of(device: str, machines: Sequence[Machine]) -> str:
    """Ray's resource for a kind of device: the kind's own name if a machine has it, or else the one that Ray uses."""
    kind = device.partition(":")[0].upper()
    if kind == "AUTO":
        from llama_adapter.runtime.devices import ACCELERATORS  # imports torch, which the command line's help does not

        names = (*(accelerator.kind.upper() for accelerator in ACCELERATORS), "GPU")
        return next((name for name in names if any(machine.count(name) for machine in machines)), "CPU")
    return kind if any(machine.count(kind) for machine in machines) else RAY_NAMES.get(kind, "GPU")


def plan_places(
    machines: Sequence[Machine], *, device: str, actors: int | None, flag: str = "--actors", ranks: int = 1
) -> list[Place]:
    """A place for each of `actors` captioners; by default, for as many captioners as the devices allow.

    A captioner with several `ranks` takes one device for each rank, all on one machine. On CPUs, the default is one
    captioner for each machine. Raises UsageError, which uses `flag` for the number of actors, if the cluster lacks the
    resources.
    """
    resource = resource_of(device, machines)
    fit = sorted((machine for machine in machines if machine.count(resource)), key=lambda machine: machine.id)
    if not fit:
        raise UsageError(
            f"The cluster has no {resource} for --device {device}",
            hint="ray status shows what it has; pass another --device, or add machines",
        )
    if resource == "CPU":
        return _on_processors(fit, actors=actors)
    slots = [machine for machine in fit for _ in range(machine.count(resource) // ranks)]
    if not slots or (actors is not None and actors > len(slots)):
        asked = [f"{flag} {actors}"] * (actors is not None) + [f"--tensor-parallel {ranks}"] * (ranks > 1)
        raise UsageError(
            f"{' with '.join(asked)} needs {ranks} {resource} of one machine for each captioner, and the cluster has "
            f"them for {len(slots)}",
            hint="ray status shows what it has; pass smaller numbers, or add machines",
        )
    # A worker sees only its own devices, numbered from 0, so the device number of the job is dropped.
    kind = device.partition(":")[0]
    return [
        Place(machine=machine.id, device=kind, num_cpus=READING_CPUS, devices={resource: float(ranks)}, threads=None)
        for machine in slots[:actors]
    ]


def _on_processors(machines: Sequence[Machine], *, actors: int | None) -> list[Place]:
    """Distribute captioners over the machines in turn. Each reserves its share of the CPUs, less those for reading."""
    wanted = len(machines) if actors is None else actors
    places = []
    for position, machine in enumerate(machines):
        here = len(range(position, wanted, len(machines)))
        if not here:
            continue
        cpus = machine.count("CPU")
        share = (cpus - 2 * READING_CPUS) / here if cpus > 1 else READING_CPUS / here
        # Ray accepts fractions only below one.
        num_cpus = float(math.floor(share)) if share >= 1 else math.floor(share * 100) / 100
        places += [
            Place(machine=machine.id, device=HOST, num_cpus=num_cpus, devices={}, threads=max(1, cpus // here))
        ] * here
    return places


def num_reading_tasks(machines: Sequence[Machine], *, num_captioners: int) -> int:
    """The number of tasks that may read at once: at most four for each captioner, and at most half of the CPUs."""
    cpus = sum(machine.count("CPU") for machine in machines)
    return max(2, min(4 * num_captioners, cpus // 2))
