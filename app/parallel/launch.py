"""The place of this process among those that `torchrun` started. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from llama_adapter.runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """What `torchrun` says in the environment."""

    rank: int
    size: int
    local_rank: int


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """This process's place if `torchrun` started it, or another program that sets the same variables; else None."""
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
    except (KeyError, ValueError):
        return None
    if "MASTER_ADDR" not in environ or not 0 <= rank < size:
        return None
    return Launched(rank=rank, size=size, local_rank=local_rank)


def launched_follower(num_ranks: int) -> Launched | None:
    """This process's place if it is one of several that share a decoder, and not the first; else None."""
    place = launched()
    return place if num_ranks > 1 and place is not None and place.rank > 0 else None


def quieten_torch() -> None:
    """Before torch is imported: it prints no stack traces while it looks for other ranks; an error says why."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def refuse_launch(num_ranks: int) -> None:
    """Raise UsageError if this process is one of several of `torchrun`: on a Ray cluster, models start their ranks."""
    place = launched()
    if num_ranks > 1 and place is not None and place.size > 1:
        raise UsageError(
            "torchrun has started this process, and --engine ray starts the ranks of its models itself",
            hint="start the command once, without torchrun",
        )


def checked_launch(num_ranks: int) -> Launched | None:
    """As `launched`, None for a single process. Raises UsageError unless there are `num_ranks` processes."""
    place = launched()
    if place is None or place.size == 1:
        return None
    if place.size != num_ranks:
        raise UsageError(
            f"torchrun started {place.size} processes, and --tensor-parallel is {num_ranks}",
            hint="give both the same number",
        )
    return place
