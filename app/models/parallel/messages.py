"""Messages of the ranks that this process started, over the socket that each of them has inherited.

No other process can reach these sockets. Both classes have the methods of a store of torch.distributed that ranks need.
Imports no torch.
"""

import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress


class ReceivedMessages:
    """The values that ranks have set, on the first rank. A thread for each rank reads them until the rank ends."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def receive(self, connection: socket.socket) -> None:
        """Read the messages of a rank in the background."""
        threading.Thread(target=self._read, args=(connection.makefile("rwb"),), name="messages", daemon=True).start()

    def _read(self, file: "socket.SocketIO") -> None:
        with suppress(OSError), file:
            for line in file:
                key, value = json.loads(line)
                self._values[key] = value.encode()
                file.write(b".")
                file.flush()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """The last value of `key`. Raises KeyError."""
        return self._values[key]


class SentMessages:
    """The other end, in a rank that was started."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is the rank's end of the socket."""
        self._connection = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Returns when the first rank has the value. Raises RuntimeError if that rank has ended."""
        with self._lock:
            try:
                self._connection.sendall(json.dumps((key, value)).encode() + b"\n")
                if self._connection.recv(1):
                    return
            except OSError:
                pass
        raise RuntimeError("the first rank has ended")

    def clone(self) -> "SentMessages":
        """This object: its calls do not wait for other ranks."""
        return self
