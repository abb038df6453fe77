"""Threads follow the quota of processors of the process's cgroups."""

import os
from pathlib import Path
from unittest import mock

import pytest

from llama_adapter.runtime import cgroups, torch_import
from llama_adapter.runtime.host_cpus import cpu_quota, usable_cpus


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "1000 100000\n"}, 0.01),
        ({"cpu.max": "odd\n"}, None),
        ({"cpu.max": ""}, None),
        ({"cpu.max": "150000\n"}, None),
        ({"cpu.max": "1 2 3\n"}, None),
        ({"cpu.max": "inf 100000\n"}, None),
        ({"cpu.max": "100000 inf\n"}, None),
        ({"own": "\nodd\n0:odd\n0::/a\n", "a/cpu.max": "1 2"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        # A service of systemd, whose slice has less; a job of Slurm; a path of the host that a container does not see.
        (
            {"own": "0::/a.slice/b.service\n", "a.slice/b.service/cpu.max": "max 100000\n", "a.slice/cpu.max": "1 2"},
            0.5,
        ),
        ({"own": "0::/a.slice/b.service\n", "a.slice/b.service/cpu.max": "1 4", "a.slice/cpu.max": "1 2"}, 0.25),
        (
            {
                "own": "5:memory:/other\n3:cpu,cpuacct:/slurm/job_7\n",
                "cpu/other/cpu.cfs_quota_us": "10000\n",
                "cpu/other/cpu.cfs_period_us": "100000\n",
                "cpu/slurm/job_7/cpu.cfs_quota_us": "300000\n",
                "cpu/slurm/job_7/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        ({"own": "0::/docker/c0ffee\n", "cpu.max": "150000 100000\n"}, 1.5),
    ],
)
def test_a_quota_is_that_of_the_cgroup(
    files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    allowed = len(os.sched_getaffinity(0))

    assert cpu_quota(tmp_path) == quota
    assert usable_cpus(tmp_path) == (allowed if quota is None else max(1, min(allowed, -int(-quota // 1))))


@pytest.mark.parametrize(
    ("quota", "given", "expected"), [(0.5, {}, "1"), (0.5, {"OMP_NUM_THREADS": "2"}, "2"), (None, {}, None)]
)
def test_torch_gets_as_many_threads_as_the_quota_has(
    quota: float | None, given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_import, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch_import, "usable_cpus", lambda: 1)
    with mock.patch.dict(os.environ, given, clear=True):
        torch_import.prepare_imports()
        assert os.environ.get("OMP_NUM_THREADS") == expected
