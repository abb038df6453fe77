"""The rank of this process among the processes that `torchrun` started. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST: Final = 2**20
LOOPBACK: Final = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """A rank among those of one decoder: as `torchrun` says in the environment, or as the first rank does."""

    rank: int
    size: int
    local_rank: int
    is_local: bool  # all ranks are on this machine


def launched(environ: Mapping[str, str] = os.environ) -> Launched | None:
    """This process's ranks if `torchrun`, or a program that sets the same variables, started it; otherwise None.

    Raises UsageError if some of the variables are missing, or their values are not valid.
    """
    given = [name for name in _VARIABLES if environ.get(name)]
    if environ.get("WORLD_SIZE") == "1" or not {"RANK", "WORLD_SIZE"} & set(given):
        return None
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise UsageError(
            f"The environment has {', '.join(given)}, and lacks {', '.join(missing)}",
            hint="a program that starts ranks sets all four; without them the command starts its ranks itself",
        )
    size = _number(environ, "WORLD_SIZE", 1, _MOST)
    rank = _number(environ, "RANK", 0, size - 1)
    _number(environ, "MASTER_PORT", 1, 65535)
    is_local = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"] or environ["MASTER_ADDR"] in LOOPBACK
    local_rank = rank if is_local else 0
    if environ.get("LOCAL_RANK"):
        local_rank = _number(environ, "LOCAL_RANK", 0, _MOST)
    return Launched(rank=rank, size=size, local_rank=local_rank, is_local=is_local)


def _number(environ: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environ[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UsageError(
            f"The variable {name} must be a whole number from {least} to {most}, got {shown_excerpt(repr(text))}",
            hint="the program that starts the ranks sets it",
        )
    return int(text)


def launched_follower(num_ranks: int) -> Launched | None:
    """This process's ranks if it is one of several that share a decoder, and not the first; otherwise None."""
    place = launched() if num_ranks > 1 else None
    return place if place is not None and place.rank > 0 else None


def quieten_torch() -> None:
    """Keep torch from printing stack traces while it looks for other ranks. Call it before torch is imported.

    Errors are still raised.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def refuse_launch(num_ranks: int) -> None:
    """Raise UsageError if `torchrun` started several processes: on a Ray cluster, each model starts its own ranks."""
    if num_ranks > 1 and launched() is not None:
        raise UsageError(
            "torchrun has started this process, and --engine ray starts the ranks of its models itself",
            hint="start the command once, without torchrun",
        )


def checked_launch(num_ranks: int) -> Launched | None:
    """As `launched`. Raises UsageError unless there are `num_ranks` processes."""
    place = launched()
    if place is not None and place.size != num_ranks:
        raise UsageError(
            f"torchrun started {place.size} processes, and --tensor-parallel is {num_ranks}",
            hint="give both the same number",
        )
    return place
