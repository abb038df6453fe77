"""The settings of replicas, the resources that a replica reserves, and how a loading error reaches the command."""

import sys

import pytest

from llama_adapter.app.command_line.main import main
from llama_adapter.app.jobs.clusters.cluster import RayOptions, joined_cluster
from llama_adapter.app.jobs.clusters.places import Machine
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.replicas.deployment import deployment_options, max_ongoing_requests, plan_replica
from llama_adapter.app.serving.replicas.replica import NotLoadedError, not_loaded, problem_in
from llama_adapter.app.serving.replicas.types import DeploymentSettings, MemoryShare
from llama_adapter.runtime.errors import DeviceError, ExitCode, TooLittleMemoryError, UsageError
from llama_adapter.runtime.problems import describe


def measured(machines: list[str]) -> dict[str, int | None]:
    """The free bytes of machines; `c` does not know them, and `d` does not answer."""
    return {machine: None if machine == "c" else 7 for machine in machines if machine != "d"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["web", "--engine", "ray"], "--engine"),
        (["serve", "--replicas", "2"], "go with --engine ray"),
        (["serve", "--ray-address", "head:6379"], "go with --engine ray"),
        (["serve", "--engine", "ray", "--replicas", "0"], "--replicas must be at least 1"),
        (
            ["serve", "--engine", "ray", "--replicas", "3", "--max-replicas", "2"],
            "--max-replicas must be at least --replicas",
        ),
        (["serve", "--engine", "ray", "--ray-address", "ray://head:10001"], "--ray-address must be HOST:PORT"),
        (["serve", "--engine", "mpi"], "invalid choice"),
    ],
)
def test_flags_that_exclude_each_other_are_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(flags) == ExitCode.USAGE
    assert words in capsys.readouterr().err


def test_torchrun_starts_no_ranks_of_models_on_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    assert main(["serve", "--engine", "ray", "--tensor-parallel", "2"]) == ExitCode.USAGE
    assert "without torchrun" in capsys.readouterr().err


def test_a_missing_ray_serve_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with (
        pytest.raises(UsageError, match="ray") as refused,
        joined_cluster(RayOptions(), package="ray.serve", extra="replicas"),
    ):
        pass
    assert "[replicas]" in refused.value.hint


def test_a_replica_reserves_a_device_or_its_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    devices = [Machine(id="a", resources={"CPU": 8, "XPU": 2})]
    place = plan_replica(devices, device="xpu:1", replicas=2, flag="--replicas")
    assert place.device == "xpu"
    assert place.actor_options() == {"num_cpus": 0.5, "num_gpus": 0, "resources": {"XPU": 1.0}}
    with pytest.raises(UsageError, match=r"--max-replicas 3 needs 1 XPU .*, and the cluster has them for 2"):
        plan_replica(devices, device="xpu", replicas=3, flag="--max-replicas")

    host = [Machine(id="a", resources={"CPU": 8})]
    place = plan_replica(host, device="cpu", replicas=2, flag="--replicas")
    assert (place.num_cpus, place.threads) == (3.0, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert plan_replica(host, device="cpu", replicas=2, flag="--replicas").threads == 1


def test_a_replica_of_several_ranks_reserves_as_many_devices_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machines = [Machine(id="a", resources={"CPU": 8, "GPU": 4}), Machine(id="b", resources={"CPU": 8, "GPU": 3})]
    place = plan_replica(machines, device="cuda:1", replicas=3, flag="--replicas", ranks=2)
    assert place.actor_options() == {"num_cpus": 0.5, "num_gpus": 2.0, "resources": {}}
    assert place.num_replicas == {"a": 2, "b": 1}
    assert (place.most_per_machine, place.memory_shares(measured)) == (None, {}), (
        "each has the memory of its own devices"
    )
    with pytest.raises(UsageError, match="--replicas 4 with --tensor-parallel 2"):
        plan_replica(machines, device="cuda", replicas=4, flag="--replicas", ranks=2)

    host = plan_replica(machines, device="cpu", replicas=4, flag="--replicas", ranks=2)
    assert host.threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan_replica(machines, device="cpu", replicas=2, flag="--replicas", ranks=2).threads == 6
    assert plan_replica(machines, device="cuda", replicas=2, flag="--replicas", ranks=2).threads == 3, "of rank 0"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray Serve's own configuration
def test_memory_is_divided_by_the_most_replicas_that_a_machine_may_get() -> None:
    machines = [Machine(id=name, resources={"CPU": 8}) for name in "abcd"]
    shared = {number: plan_replica(machines, device="cpu", replicas=number, flag="--replicas") for number in (4, 5, 8)}
    assert {number: place.most_per_machine for number, place in shared.items()} == {4: 1, 5: 2, 8: 2}
    assert shared[4].memory_shares(measured) == {}
    share = MemoryShare(num_bytes=3, num_replicas=2)
    assert shared[5].memory_shares(measured) == {"a": share, "b": share}, "Ray Serve may place two on either"

    settings = DeploymentSettings(replicas=5)
    assert deployment_options(settings, shared[5], max_ongoing_requests=16)["max_replicas_per_node"] == 2


def test_too_little_memory_for_all_replicas_of_a_machine_says_what_to_do() -> None:
    error = TooLittleMemoryError("4 slots need 9.0 GB, and 5.0 GB are free on cpu", hint="try a smaller --batch-size")
    share = MemoryShare(num_bytes=5 * 10**9, num_replicas=2)

    problem = not_loaded(error, share)
    assert problem.sentence == "4 slots need 9.0 GB, and 5.0 GB are free on cpu for each of 2 replicas on this machine"
    assert problem.hint.startswith("try a smaller --batch-size; or fewer replicas by --replicas")
    assert not_loaded(error, None) == describe(error)
    other = DeviceError("There is no `gpu`")
    assert not_loaded(other, share) == describe(other)


def test_a_replica_takes_two_batches_and_the_number_of_replicas_is_between_two() -> None:
    assert max_ongoing_requests(CaptionerSpec(batch_size=8)) == 16
    assert max_ongoing_requests(CaptionerSpec(batch_size="auto")) == 128
    assert DeploymentSettings(replicas=2).most == 2
    assert DeploymentSettings(replicas=2, max_replicas=5).most == 5


def test_an_error_of_loading_survives_the_text_that_ray_serve_makes_of_it() -> None:
    problem = describe(DeviceError('There is no `gpu`: "none"\n', hint="pass --device cpu"))
    text = (
        f"The deployment failed to start. Error:\n\x1b[36mray::Replica\n{NotLoadedError(problem, host='there')}\n  more"
    )

    assert problem_in(text) == ("there", problem)
    assert problem_in("The actor died") is None
