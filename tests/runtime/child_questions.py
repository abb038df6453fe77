"""Questions for a child process: one has an answer, three fail in different ways."""

import os
import time
from typing import Any

from llama_adapter.runtime.child_process import ok


def says(text: str) -> dict[str, Any]:
    print("noise")
    return ok(text)


def raises() -> dict[str, Any]:
    raise OSError("no\nluck")


def dies() -> dict[str, Any]:
    os.kill(os.getpid(), 11)
    return ok("")


def hangs() -> dict[str, Any]:
    time.sleep(60)
    return ok("")
