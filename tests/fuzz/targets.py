"""The list of all targets."""

from importlib import import_module

from tests.fuzz.target import Target

ROOMS = ("pictures", "records", "inputs", "labelled", "checkpoints", "encoded", "requests", "page")
TARGETS: dict[str, Target] = {
    target.name: target for room in ROOMS for target in import_module(f"tests.fuzz.{room}").TARGETS
}
