"""What users may say of replicas, what a replica reserves, and how an error of loading reaches the command."""

import sys

import pytest

from llama_adapter.app.cli import main
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.replicas.deployment import max_ongoing_requests
from llama_adapter.app.replicas.placement import plan_replica
from llama_adapter.app.replicas.replica import NotLoadedError, problem_in
from llama_adapter.app.replicas.types import DeploymentSettings
from llama_adapter.app.scale.cluster import RayOptions, joined_cluster
from llama_adapter.app.scale.places import Machine
from llama_adapter.runtime.errors import DeviceError, ExitCode, UsageError
from llama_adapter.runtime.problems import describe


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--replicas", "2"], "go with --engine ray"),
        (["--ray-address", "head:6379"], "go with --engine ray"),
        (["--engine", "ray", "--replicas", "0"], "--replicas must be at least 1"),
        (["--engine", "ray", "--replicas", "3", "--max-replicas", "2"], "--max-replicas must be at least --replicas"),
        (["--engine", "ray", "--ray-address", "ray://head:10001"], "--ray-address must be HOST:PORT"),
        (["--engine", "mpi"], "invalid choice"),
    ],
)
def test_flags_that_exclude_each_other_are_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["serve", *flags]) == ExitCode.USAGE
    assert words in capsys.readouterr().err


def test_the_page_has_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["web", "--engine", "ray"]) == ExitCode.USAGE
    assert "--engine" in capsys.readouterr().err


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
    with pytest.raises(UsageError, match="--max-replicas 3 needs as many devices, and the cluster has 2 XPU"):
        plan_replica(devices, device="xpu", replicas=3, flag="--max-replicas")

    host = [Machine(id="a", resources={"CPU": 8})]
    place = plan_replica(host, device="cpu", replicas=2, flag="--replicas")
    assert (place.num_cpus, place.threads) == (3.0, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert plan_replica(host, device="cpu", replicas=2, flag="--replicas").threads == 1


def test_a_replica_takes_two_batches() -> None:
    assert max_ongoing_requests(CaptionerSpec(batch_size=8)) == 16
    assert max_ongoing_requests(CaptionerSpec(batch_size="auto")) == 128


def test_the_number_of_replicas_follows_the_load_between_two_numbers() -> None:
    assert DeploymentSettings(replicas=2).most == 2
    assert DeploymentSettings(replicas=2, max_replicas=5).most == 5


def test_an_error_of_loading_survives_the_text_that_ray_serve_makes_of_it() -> None:
    problem = describe(DeviceError('There is no `gpu`: "none"\n', hint="pass --device cpu"))
    text = (
        f"The deployment failed to start. Error:\n\x1b[36mray::Replica\n{NotLoadedError(problem, host='there')}\n  more"
    )

    assert problem_in(text) == ("there", problem)
    assert problem_in("The actor died") is None
