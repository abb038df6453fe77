"""Processes on one machine divide the cores among themselves without communicating."""

import os
from contextlib import ExitStack, closing

import pytest

from llama_adapter.app.models.parallel.cores import OwnCores


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of cores that no machine has, so that no other process has taken them."""
    cores = list(range(10_000, 10_006))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    return cores


def test_two_processes_have_different_cores_and_the_third_one_shares(cores: list[int]) -> None:
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(OwnCores(count))) for count in (2, 3, 3))
        assert first.cores == cores[:2]
        assert second.cores == cores[2:5]
        assert third.cores == [cores[5], *cores[:2]], "its own first"
        first.close()
        with closing(OwnCores(2)) as replaced:
            assert replaced.cores == first.cores, "those of a process that ended are free again"
    with closing(OwnCores(8)) as own:
        assert own.cores == cores, "no more than there are"
