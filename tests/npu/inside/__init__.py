"""Code that runs with torch_npu loaded on the fake CANN. It is not collected as tests."""

import json
import os
from collections.abc import Callable
from typing import Any


def in_fork(job: Callable[[], Any], **environment: str) -> Any:
    """Run `job` in a fork of this process with these environment variables; returns its JSON result.

    A process can open only one kind of chip, and its imports take longer than anything that is tried on the chip.
    """
    reading, writing = os.pipe()
    if not os.fork():
        os.environ.update(environment)
        with open(writing, "w") as said:
            json.dump(job(), said)
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        content = answer.read()
    os.wait()
    return json.loads(content)
