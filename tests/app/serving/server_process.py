"""`llama-adapter serve` as a child process: its address, its stderr, and shutdown."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self

READY = "serving on "


class ServerProcess:
    """A server on a free port of loopback. It is ready when the constructor returns."""

    def __init__(
        self, *flags: str, command: Sequence[str] = ("-m", "llama_adapter", "serve"), timeout_s: float = 300.0
    ) -> None:
        """Start the server. Raises RuntimeError if it is not ready in time."""
        self.lines: list[str] = []  # of its stderr
        self._addresses: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, *command, "--port", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            address = self._addresses.get(timeout=timeout_s)
        except queue.Empty:
            address = None
        if address is None:
            self.kill()
            raise RuntimeError("The server did not get ready: " + " | ".join(self.lines[-5:]))
        self.host, _, port = address.removeprefix("http://").rpartition(":")
        self.port = int(port)

    def _read(self) -> None:
        """Read stderr, because a full pipe would block the server."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))
            if READY in line:
                self._addresses.put(line.partition(READY)[2].split()[0].rstrip('"}'))  # also of a line of JSON
        self._addresses.put(None)

    @property
    def url(self) -> str:
        """The address in URLs, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id, valid also after the process has ended."""
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, *, timeout_s: float) -> int:
        """Wait for the exit code; raises subprocess.TimeoutExpired."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        """Kill the process; does nothing if it has ended."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
