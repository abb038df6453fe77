"""What runs where torch_npu is loaded on the fake CANN; not collected as tests."""

import json
import os
from collections.abc import Callable
from typing import Any


def in_fork(job: Callable[[], Any], **environment: str) -> Any:
    """What `job` returns, as JSON, in a fork of this process with these variables.

    A process opens one kind of chip once, and its imports take longer than anything tried on the chip.
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
