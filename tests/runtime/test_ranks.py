"""Failed collectives: whose failure it is."""

import errno
import mmap
from typing import Any

import pytest
import torch

from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.ranks import CollectiveError, collective

RESET = "[pair.cc:537] Read error [127.0.0.1]:11443: Connection reset by peer"


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError(RESET), CollectiveError), (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError)],
)
def test_a_collective_fails_because_of_another_rank_unless_memory_ran_out_in_it(
    error: Exception, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=str(error).rpartition(": ")[2]), collective():
        raise error


def test_a_process_without_memory_has_failed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refused)
    with pytest.raises(MemoryError) as caught, collective():
        raise RuntimeError(RESET)
    assert describe(caught.value).sentence.startswith("The memory is not enough")
