"""Failed collectives: whose failure it is."""

import errno
import mmap
from typing import Any

import pytest
import torch

from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.ranks import CollectiveError, collective

RESET = "[pair.cc:537] Read error [127.0.0.1]:11443: Connection reset by peer"


def test_a_collective_fails_because_of_another_rank() -> None:
    with pytest.raises(CollectiveError, match="Connection reset by peer"), collective():
        raise RuntimeError(RESET)


def test_a_collective_fails_because_memory_ran_out_in_it() -> None:
    with pytest.raises(torch.OutOfMemoryError), collective():
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_process_without_memory_has_failed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(MemoryError) as caught, collective():
        raise RuntimeError(RESET)
    assert describe(caught.value).sentence.startswith("The memory is not enough")
