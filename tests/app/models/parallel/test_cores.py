"""Processes on one machine divide the cores among themselves without communicating."""

import os

import pytest

from llama_adapter.app.models.parallel.cores import OwnCores


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of cores that no machine has, so that no other process has taken them."""
    cores = list(range(10_000, 10_006))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    return cores


def test_two_processes_have_different_cores_and_the_third_one_shares(cores: list[int]) -> None:
    first, second, third = OwnCores(2), OwnCores(3), OwnCores(3)
    try:
        assert first.cores == cores[:2]
        assert second.cores == cores[2:5]
        assert third.cores == [cores[5], *cores[:2]], "its own first"
    finally:
        for own in (first, second, third):
            own.close()


def test_cores_of_a_process_that_ended_are_free_again(cores: list[int]) -> None:
    first, second = OwnCores(3), OwnCores(3)
    first.close()
    replaced = OwnCores(3)
    try:
        assert replaced.cores == first.cores
    finally:
        second.close()
        replaced.close()


def test_a_process_has_no_more_cores_than_there_are(cores: list[int]) -> None:
    own = OwnCores(8)
    own.close()
    assert own.cores == cores
