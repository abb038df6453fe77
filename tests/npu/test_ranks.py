"""Two ranks on NPUs: torch_npu's own process group, with a stand-in for HCCL that computes on the host.

These tests do not cover HCCL itself, its links and its times, nor whether its `HcclCommDestroy` ends a wait of the
device.
"""

import re
from typing import Any

import pytest

from llama_adapter.runtime.devices.collectives import LIBRARIES
from tests.npu.wheel import SOC, FakeNpu

pytestmark = [pytest.mark.npu_contract, pytest.mark.slow]


@pytest.fixture
def ranks(npu: FakeNpu) -> Any:
    return npu.reports()["ranks"]


@pytest.mark.proves("tensor parallelism", "NPU")
def test_two_ranks_give_the_tokens_of_one_device_and_one_that_dies_within_a_step_is_named(ranks: Any) -> None:
    assert ranks["given"] == ranks["expected"]
    assert ranks["operators"].endswith(", 2 ranks")
    assert ranks["device"] == f"npu:0 ({SOC})"
    assert re.fullmatch(r"Rank 1 of 2 \(process \d+\) failed: ended by SIGKILL", ranks["told"])


def test_each_rank_joins_on_its_own_device_and_with_the_time_limits(ranks: Any) -> None:
    joined = sorted(line for line in ranks["log"] if line.startswith("communicator"))
    limits = "connect 120, exec 60, async errors 0"

    assert joined == [f"communicator rank {rank} of 2 on device {rank}; {limits}" for rank in (0, 1)]
    assert ranks["variables"] == []  # the variables are removed after the ranks have met


def test_both_ranks_ask_for_the_same_collectives(ranks: Any) -> None:
    ours, theirs = (
        [re.sub(" rank .", "", line) for line in ranks["log"] if re.match(rf"[a-z]+ rank {rank} count", line)]
        for rank in (0, 1)
    )

    assert ours == theirs
    assert {line.split()[0] for line in ours} == {"allreduce", "allgather", "broadcast"}
    assert {line.split()[-1] for line in ours if "broadcast" not in line} == {"4"}  # float32
    assert ranks["calls"]["c10d::allreduce_"] > ranks["calls"]["c10d::_allgather_base_"] > 0


def test_sums_are_in_the_queue_and_what_the_host_reads_waits_until_the_group_is_aborted(npu: FakeNpu) -> None:
    queue = npu.reports()["queue"]

    assert queue["memory at once"] == [1.0] * 4  # the call has returned, but the other rank has not joined yet
    assert queue["read"] == [30.0] * 4
    assert queue["read without wait"] == [10.0] * 4  # it is in another queue than the kernels
    assert queue["read after wait"] == [30.0] * 4
    assert queue["training"] == [1.0, 7.0]
    assert "error code is 107023" in queue["lost"]  # the other rank has gone
    assert queue["lost is a device's error"]


def test_torch_npu_reads_the_variables(npu: FakeNpu) -> None:
    library = (npu.wheel / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()

    assert [name for name in LIBRARIES["hccl"].variables(60) if name.encode() not in library] == []
