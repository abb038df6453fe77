"""A TorchScript archive with code that writes a file when `torch.jit.load` opens the archive."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn


class WritesAFile(nn.Module):
    """Its `__setstate__` writes eight numbers to the path given in the file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.kept = torch.zeros(8)

    @torch.jit.export
    def __getstate__(self) -> str:
        return self.path

    @torch.jit.export
    def __setstate__(self, state: str) -> None:
        self.path = state
        self.training = False
        self.kept = torch.from_file(state, True, 8).fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x


def write_hostile_archive(path: Path, *, target: Path) -> None:
    """Write an archive at `path` whose code writes to `target`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch declares its own format deprecated
        torch.jit.script(WritesAFile(str(target))).save(str(path))
