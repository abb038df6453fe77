"""The `llama-adapter` of the pages in docs/, for their test: what takes longest is done once per test run, or shorter.

`doctor` examines the environment once, `train` takes fewer steps.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


@contextmanager
def _environment_shared() -> Iterator[None]:
    from dataclasses import asdict

    from llama_adapter.app.command_line.doctor import command
    from llama_adapter.app.command_line.doctor.environment import Probe, look_at_environment
    from tests.fakes.exported import made_once

    def look() -> list[Probe]:
        with made_once("environment.json") as (path, is_missing):
            if is_missing:
                path.write_text(json.dumps([asdict(probe) for probe in look_at_environment()]))
        return [Probe(**values) for values in json.loads(path.read_text())]

    command.look_at_environment = look
    yield


@contextmanager
def _training_shortened() -> Iterator[None]:
    from llama_adapter.app.learning.training import eye, job

    eye._FEWEST_BLOCK_STEPS, job._STEPS_OVER_TRAINED_EYE = 5, 10
    yield


_PREPARED = {"doctor": _environment_shared, "train": _training_shortened}

if __name__ == "__main__":
    from llama_adapter.runtime.torch_import import prepare_imports

    prepare_imports()  # before anything that is prepared imports torch
    from llama_adapter.__main__ import main

    with _PREPARED.get(sys.argv[1], nullcontext)():
        sys.exit(main())
