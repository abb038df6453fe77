"""The corpus: seeds of targets, and inputs in the repository that once showed a bug."""

from collections.abc import Mapping
from pathlib import Path

from tests.fuzz.target import Target

FOLDER = Path(__file__).with_name("corpus")


def entries(target: Target) -> Mapping[str, bytes]:
    """Seeds and files of a target, by name."""
    folder = FOLDER / target.name
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {**target.seeds(), **{path.name: path.read_bytes() for path in files}}
