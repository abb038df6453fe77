"""Ranks of a training: how they join."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_adapter.app.learning.training import ranks as module
from llama_adapter.app.learning.training.ranks import TrainingRanks
from llama_adapter.app.models.parallel.launch import Launched


def test_the_time_limit_and_the_watchdog_of_a_queued_library_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in a device's queue raise no error if another rank has ended: without the watchdog, a rank waits forever."""
    environ, joined = dict[str, str](), list[tuple[Any, ...]]()

    def join(library: str, *, timeout: timedelta, **_: object) -> None:
        joined.append((library, timeout, dict(environ)))

    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(module, "environment_store", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", join)
    backend: Any = SimpleNamespace(device=torch.device("cpu"), capabilities=SimpleNamespace(collectives="nccl"))
    TrainingRanks(Launched(rank=1, size=2, local_rank=1, is_local=True), backend=backend, timeout_s=90.0)

    on_loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    assert joined == [("nccl", timedelta(seconds=90), on_loopback)]
    assert environ == on_loopback, "groups that are made later read it too"
