"""How captioners are placed in a cluster, which settings users may give, and what is said when Ray ends a driver."""

import os
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.clusters.cluster import RayOptions, joined_cluster
from llama_adapter.app.jobs.clusters.places import Machine, num_reading_tasks, plan_places
from llama_adapter.app.jobs.clusters.runner import last_words
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec
from llama_adapter.runtime.errors import UsageError


def machine(name: str, **resources: float) -> Machine:
    return Machine(id=name, resources=resources)


HEAD, A, B = machine("head", CPU=4), machine("a", CPU=16, GPU=2), machine("b", CPU=16, GPU=1)


@pytest.mark.parametrize(
    ("cluster", "device", "places"),
    [
        ([HEAD, A, B], "gpu-like:3", [("a", {"GPU": 1.0}, "gpu-like")] * 2 + [("b", {"GPU": 1.0}, "gpu-like")]),
        # A device type that Ray knows by name is reserved under this name.
        ([machine("a", CPU=8, XPU=2, GPU=1)], "xpu", [("a", {"XPU": 1.0}, "xpu")] * 2),
        ([machine("a", CPU=8, GPU=1), machine("b", CPU=8)], "auto", [("a", {"GPU": 1.0}, "auto")]),
        ([machine("a", CPU=8, GPU=1), machine("b", CPU=8, NPU=1)], "auto", [("b", {"NPU": 1.0}, "auto")]),
        ([machine("b", CPU=8)], "auto", [("b", {}, "cpu")]),
        (
            [machine("head", CPU=0), machine("a", CPU=8), machine("b", CPU=2)],
            "cpu",
            [("a", {}, "cpu"), ("b", {}, "cpu")],
        ),
    ],
)
def test_every_device_has_a_captioner_on_its_machine(
    cluster: list[Machine], device: str, places: list[tuple[str, dict[str, float], str]]
) -> None:
    planned = plan_places(cluster, device=device, actors=None)

    assert [(place.machine, place.devices, place.device) for place in planned] == places


def test_a_captioner_on_processors_leaves_one_to_readers() -> None:
    planned = plan_places([machine("a", CPU=8), machine("b", CPU=2)], device="cpu", actors=None)

    assert [(place.num_cpus, place.threads) for place in planned] == [(7.0, 8), (1.0, 2)]


@pytest.mark.parametrize("cpus", [1, 2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("actors", [1, 2, 3, 5, 16])
def test_captioners_leave_room_for_readers_on_every_machine(cpus: int, actors: int) -> None:
    cluster = [machine("a", CPU=cpus), machine("b", CPU=cpus)]

    places = plan_places(cluster, device="cpu", actors=actors)

    assert len(places) == actors
    reserved = Counter[str]()
    for place in places:
        reserved[place.machine] += place.num_cpus  # type: ignore[assignment]
        assert place.num_cpus <= 1 or place.num_cpus == int(place.num_cpus)  # the numbers that Ray accepts
        assert place.threads >= 1
    assert max(reserved.values()) <= cpus - 0.5
    assert max(Counter(place.machine for place in places).values()) == -(-actors // 2)


@pytest.mark.parametrize(
    ("device", "actors", "words"),
    [
        ("gpu-like", None, "The cluster has no GPU for --device gpu-like"),
        ("gpu-like", 2, "--actors 2 needs 1 GPU of one machine"),
        ("npu:0", 1, "The cluster has no NPU for --device npu:0"),  # an NPU's captioner is not put on a GPU
    ],
)
def test_a_device_that_the_cluster_has_not_is_a_usage_error(device: str, actors: int | None, words: str) -> None:
    cluster = [machine("a", CPU=8)] if actors is None else [machine("a", CPU=8, GPU=1)]

    with pytest.raises(UsageError, match=words) as caught:
        plan_places(cluster, device=device, actors=actors)

    assert caught.value.hint


def test_ranks_of_a_captioner_are_on_one_machine() -> None:
    large, small = machine("large", CPU=16, GPU=5), machine("small", CPU=16, GPU=2)

    places = plan_places([HEAD, large, small], device="gpu-like", actors=None, ranks=2)

    assert [(place.machine, place.devices) for place in places] == [
        ("large", {"GPU": 2.0}),
        ("large", {"GPU": 2.0}),
        ("small", {"GPU": 2.0}),
    ]


@pytest.mark.parametrize(
    ("actors", "ranks", "words"),
    [
        (1, 4, "--actors 1 with --tensor-parallel 4 needs 4 GPU of one machine for each captioner, .* for 0"),
        (None, 3, "^--tensor-parallel 3 needs 3 GPU of one machine for each captioner, .* for 0"),
        (2, 2, "--actors 2 with --tensor-parallel 2 needs 2 GPU of one machine for each captioner, .* for 1"),
    ],
)
def test_devices_of_several_machines_are_not_those_of_one(actors: int | None, ranks: int, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        plan_places([A, B], device="gpu-like", actors=actors, ranks=ranks)
    assert "pass smaller numbers" in refused.value.hint


def test_readers_are_as_many_as_captioners_can_use_and_take_half_of_the_processors() -> None:
    assert num_reading_tasks([machine("a", CPU=64)], num_captioners=2) == 8
    assert num_reading_tasks([machine("a", CPU=8)], num_captioners=8) == 4
    assert num_reading_tasks([machine("a", CPU=1)], num_captioners=1) == 2


@pytest.mark.parametrize(("actors", "address"), [(0, None), (None, "ray://head:10001")])
def test_options_out_of_range_are_refused(actors: int | None, address: str | None) -> None:
    with pytest.raises(ValueError, match=r"actors|address"):
        RayOptions(actors=actors, address=address)


def test_without_ray_the_hint_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(UsageError, match="needs the package ray") as caught, joined_cluster(RayOptions()):
        pass

    assert ".[ray]" in caught.value.hint


# Last words, when Ray ends the driver from native code


def said(end: Callable[[], object]) -> tuple[str, int]:
    """The stderr and exit code of a fork of this process that sets its last words and calls `end`."""
    job = Job(spec=CaptionerSpec(), inputs=InputSpec(paths=("a",)), questions=(Question(),), out="answers.jsonl")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.dup2(writer, 2)
            os.close(writer)
            with last_words(job):
                end()
            os._exit(0)
        finally:
            os._exit(70)
    os.close(writer)
    with open(reader) as words:
        return words.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_process_says_what_is_kept_and_how_to_go_on(snapshot: object) -> None:
    assert said(lambda: os._exit(1)) == snapshot


def test_a_child_process_that_outlives_the_job_does_not_delay_its_end() -> None:
    """The child has inherited the pipe end whose closing the listener waits for."""
    gate, ours = os.pipe()

    def leave_a_child() -> None:
        if not os.fork():
            os.closerange(0, 3)
            os.close(ours)
            os.read(gate, 1)
            os._exit(0)

    assert said(leave_a_child) == ("", 0)
    os.close(ours)
    os.close(gate)
