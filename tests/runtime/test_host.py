"""Processors and memory of the host and of its container, and errors of failed allocations."""

import os
from pathlib import Path
from unittest import mock

import pytest

from llama_adapter.runtime import cgroups, torch_import
from llama_adapter.runtime.device_failures import tells_shortage
from llama_adapter.runtime.host_cpus import cpu_quota, usable_cpus
from llama_adapter.runtime.host_memory import free_host_bytes, plan_with, statistic


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


GIB = 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def group(folder: Path, *, limit: str, used: int = GIB, inactive: int = 0, active: int = 0) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file {active}\n")
    return folder


@pytest.mark.parametrize(
    ("used", "caches", "free"),
    [(GIB // 2, (GIB // 8, GIB // 16), GIB // 2 + GIB // 8 + GIB // 16), (GIB + 1, (0, 0), 0)],
)
def test_a_container_has_the_rest_of_its_limit(used: int, caches: tuple[int, int], free: int, tmp_path: Path) -> None:
    small = group(tmp_path, limit=str(GIB), used=used, inactive=caches[0], active=caches[1])

    assert free_host_bytes(small) == free


@pytest.mark.parametrize(
    ("own", "place", "names"),
    [
        ("0::/system.slice/captions.service\n", "system.slice", ("memory.max", "memory.current", "")),
        ("4:memory:/slurm/job_7/step_0\n0::/\n", "memory/slurm/job_7", V1),
        ("0::/\n", "memory", V1),  # a container of version 1
    ],
)
def test_limits_of_services_and_jobs_count(
    own: str, place: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    limit, used, prefix = names
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / limit).write_text(f"{GIB}\n")
    (folder / used).write_text(f"{GIB // 2}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\n{prefix}inactive_file {GIB // 8}\n")

    assert free_host_bytes(tmp_path) == GIB // 2 + (GIB // 8 if prefix else 1)


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    total = statistic(Path("/proc/meminfo"), "MemTotal:")
    assert total is not None

    assert free_host_bytes(tmp_path)
    for limit in ("max", str(2**62), "", "inf", "nan", "1 2"):
        free = free_host_bytes(group(tmp_path, limit=limit))
        assert free is not None
        assert 0 < free < total * 1024


def test_a_process_plans_with_its_part_of_the_machine(tmp_path: Path) -> None:
    small = group(tmp_path, limit=str(GIB), used=GIB // 2)
    try:
        plan_with(GIB // 4)
        assert free_host_bytes(small) == GIB // 4
        plan_with(GIB)
        assert free_host_bytes(small) == GIB // 2, "a part of what is not there is none"
    finally:
        plan_with(None)
    assert free_host_bytes(small) == GIB // 2


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", False),
        ("could not create a primitive", True),
        ("could not create a primitive descriptor for a matmul primitive", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("shape mismatch", False),
    ],
)
def test_a_failed_allocation_is_recognised_by_its_words(text: str, is_one: bool) -> None:
    assert tells_shortage(text) is is_one
