"""The processes of ranks, and where processes listen, as listed by the operating system."""

import ipaddress
import os
from contextlib import suppress
from pathlib import Path


def children_of(process: int) -> dict[int, bytes]:
    """The command lines of the processes that `process` has started, with null characters between words."""
    found = {}
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread, or a child, has ended meanwhile
            for one in children.read_text(encoding="ascii").split():
                found[int(one)] = Path(f"/proc/{one}/cmdline").read_bytes()
    return found


def ranks_of(process: int) -> list[int]:
    """The rank processes that `process` has started."""
    return sorted(one for one, command in children_of(process).items() if b"rank_process" in command)


def descendants(process: int) -> list[int]:
    """The processes that `process` has started, and those that they have started."""
    found = [process]
    for one in found:
        with suppress(OSError):  # it has ended meanwhile
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                found += map(int, children.read_text(encoding="ascii").split())
    return found[1:]


def listening(process: int) -> list[tuple[str, int]]:
    """The addresses and TCP ports on which a process listens; none if it has ended.

    An IPv4 address in a socket of IPv6 is given as IPv4.
    """
    try:
        return _listening(process)
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return []


def _listening(process: int) -> list[tuple[str, int]]:
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # it was closed in between
            sockets.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                text, _, port = fields[1].partition(":")
                words = [bytes.fromhex(text[place : place + 8])[::-1] for place in range(0, len(text), 8)]
                address = ipaddress.ip_address(b"".join(words))
                found.append((str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)))
    return sorted(found)
