"""The processes of ranks, and where processes listen, as listed by the operating system."""

from contextlib import suppress
from typing import Any

import psutil

from llama_adapter import Captioner


def descendants(process: int) -> list[int]:
    """The processes that `process` has started, and those that they have started; none if it has ended."""
    return [child.pid for child in started(process, recursive=True)]


def children(captioner: Captioner) -> list[Any]:
    """The rank processes of a captioner, as it holds them."""
    end: Any = captioner._close_parts
    group = end.__self__.end.__closure__[0].cell_contents
    return [child.process for child in group._children.values()]


def ranks_of(process: int) -> list[int]:
    """The rank processes that `process` has started."""
    found = []
    for child in started(process):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "rank_process" in " ".join(child.cmdline()):
                found.append(child.pid)
    return sorted(found)


def started(process: int, *, recursive: bool = False) -> list[psutil.Process]:
    """The processes that `process` has started; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process).children(recursive=recursive)
    return []


def listening(process: int) -> list[tuple[str, int]]:
    """The addresses and TCP ports on which a process listens; none if it has ended.

    An IPv4 address in a socket of IPv6 is given as IPv4.
    """
    with suppress(psutil.NoSuchProcess):
        sockets = psutil.Process(process).net_connections("tcp")
        places = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
        return sorted((place.ip.removeprefix("::ffff:"), place.port) for place in places)
    return []
