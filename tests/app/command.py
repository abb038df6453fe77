"""The command line, called in this process."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def told(self) -> str:
        """What is on stderr, as one line."""
        return " ".join(self.err.split())

    def texts(self) -> dict[str, str]:
        return {record["picture"]: record["text"] for record in self.records}


Run = Callable[..., Ran]
