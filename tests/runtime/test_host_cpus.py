"""Threads follow the container's quota of processors."""

import os
from pathlib import Path

import pytest

from llama_adapter.runtime import torch_import
from llama_adapter.runtime.host_cpus import cpu_quota, usable_cpus


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "1000 100000\n"}, 0.01),
        ({"cpu.max": "odd\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
    ],
)
def test_a_quota_is_that_of_the_cgroup(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    allowed = len(os.sched_getaffinity(0))

    assert cpu_quota(tmp_path) == quota
    assert usable_cpus(tmp_path) == (allowed if quota is None else max(1, min(allowed, -int(-quota // 1))))


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("2", "2")])
def test_torch_gets_as_many_threads_as_the_quota_has(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch_import, "cpu_quota", lambda: 0.5)
    monkeypatch.setattr(torch_import, "usable_cpus", lambda: 1)
    torch_import.limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == expected


def test_without_a_quota_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch_import, "cpu_quota", lambda: None)
    torch_import.limit_threads()
    assert "OMP_NUM_THREADS" not in os.environ
