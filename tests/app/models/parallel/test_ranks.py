"""A decoder on several ranks answers as on one. A failure of one rank ends all of them, with one sentence.

A process has at most one group of ranks, and loading one takes seconds. So the tests share a group, in any order.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from llama_adapter import Captioner
from llama_adapter.app.command_line.doctor.model import diagnose, write_known_answer
from llama_adapter.app.models.packed_bundle import split_bundle
from llama_adapter.app.models.parallel import group as group_module
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.service import Service
from llama_adapter.runtime.errors import UsageError
from tests.app.models.parallel.processes import children, listening, ranks_of
from tests.parity.exported import choice_limit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
SAMPLES = sorted((ROOT / "assets" / "pictures").glob("*.png"))[:6]
QUESTION = "Is there a red circle?"


@pytest.fixture(scope="module")
def alone() -> Iterator[Captioner]:
    with Captioner.load(batch_size=4) as captioner:
        yield captioner


class Pair:
    """A captioner on two ranks, loaded when a test needs it."""

    def __init__(self) -> None:
        self._captioner: Captioner | None = None
        self._others = set(listening(os.getpid()))  # ports of a server that tests of other files share

    def ports(self) -> list[tuple[str, int]]:
        """The ports on which this process and its ranks listen for each other."""
        places = [place for process in (os.getpid(), *ranks_of(os.getpid())) for place in listening(process)]
        return [place for place in places if place not in self._others]

    def open(self) -> Captioner:
        """The captioner, loaded again if a test has ended its ranks."""
        if self._captioner is not None and not self._captioner._engine._runner.is_usable:  # type: ignore[attr-defined]
            self.close()
        if self._captioner is None:
            self._captioner = Captioner.load(batch_size=4, tensor_parallel=2)
        return self._captioner

    def close(self) -> None:
        if self._captioner is not None:
            self._captioner.close()
            self._captioner = None


@pytest.fixture(scope="module")
def shared_pair() -> Iterator[Pair]:
    with closing(Pair()) as shared:
        yield shared


@pytest.fixture
def pair(shared_pair: Pair) -> Captioner:
    return shared_pair.open()


@pytest.fixture
def no_pair(shared_pair: Pair) -> None:
    """This process has no group of ranks, so the test can start its own."""
    shared_pair.close()


def texts(captioner: Captioner, **options: Any) -> list[str | None]:
    return [answer.text for answer in captioner.generate(SAMPLES, **options)]


@pytest.mark.usefixtures("no_pair")
def test_a_split_bundle_answers_as_the_whole_one(
    alone: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, answered, processes = Captioner.load, list[list[str | None]](), list[Any]()

    def loaded(*arguments: Any, **options: Any) -> Captioner:
        captioner = load(*arguments, **{**options, "batch_size": 4})
        answered.append(texts(captioner))
        processes.extend(children(captioner))
        return captioner

    monkeypatch.setattr(Captioner, "load", loaded)
    split = split_bundle(embedded_model(), tmp_path / "split", num_ranks=2)
    assert write_known_answer(split)
    findings = diagnose(CaptionerSpec(model=split))
    assert {finding.level for finding in findings} == {"ok"}
    assert any("about its own picture" in finding.sentence for finding in findings)
    expected = texts(alone)
    assert len(answered) >= 2
    assert all(of_one == expected for of_one in answered)
    assert {process.poll() for process in processes} == {0}, "they end with their captioners"


def test_other_users_of_this_machine_reach_only_ports_that_ignore_them(
    alone: Captioner, pair: Captioner, shared_pair: Pair
) -> None:
    assert texts(pair) == texts(alone)
    places = shared_pair.ports()
    assert len(places) == 2 * 2  # of gloo, for two groups
    assert {address for address, _ in places} == {"127.0.0.1"}
    with ExitStack() as stack:
        for place in places:
            for number in (0, 1, 2**63):  # gloo expects a number of the connection
                other = stack.enter_context(socket.create_connection(place))
                other.sendall(number.to_bytes(8, "little") + b"forged" * 100)
        assert texts(pair) == texts(alone)
    assert texts(pair) == texts(alone)


@pytest.mark.proves("tensor parallelism", "CPU")
def test_the_embedded_model_answers_as_on_one_rank(alone: Captioner, pair: Captioner) -> None:
    assert "2 ranks" in pair.info.operators
    assert texts(pair) == texts(alone)
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "max_new_tokens": 12}
    assert texts(pair, **drawn) == texts(alone, **drawn)
    chosen = ((one.generate(SAMPLES, QUESTION, choices=["Yes", "No"])) for one in (pair, alone))
    for ours, theirs in zip(*chosen, strict=True):
        assert ours.text == theirs.text
        np.testing.assert_allclose(list(ours.choice.values()), list(theirs.choice.values()), rtol=choice_limit())  # type: ignore[union-attr]
    together = pair.generate(SAMPLES, QUESTION, choices=["Yes", "No"])
    single = [pair.ask(sample, QUESTION, choices=["Yes", "No"]) for sample in SAMPLES]
    assert [answer.choice for answer in together] == [answer.choice for answer in single], "whatever its batch"
    for prefix in ("zeros", "none"):
        ours, theirs = (
            one.generate_text("a small red", text_prefix=prefix, max_new_tokens=6)[0] for one in (pair, alone)
        )
        assert ours.token_ids == theirs.token_ids


def test_prefixes_that_nobody_needs_are_released_on_all_ranks(pair: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    channel: Any = pair._engine._runner._channel  # type: ignore[attr-defined]
    send, made, unused = channel.send, set(), set()

    def recorded(told: dict[str, Any]) -> None:
        made.update(told.get("numbers", ()))
        unused.update(told["unused"])
        send(told)

    monkeypatch.setattr(channel, "send", recorded)
    texts(pair)
    of_texts = set(made)
    assert len(of_texts) == len(SAMPLES)
    pair.caption(SAMPLES[0])
    assert of_texts <= unused


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}],
    ids=["its own ranks", "torchrun"],
)
def test_a_second_group_in_one_process_is_refused(
    variables: dict[str, str], pair: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before ranks are started, or those that a launcher started are awaited."""
    monkeypatch.delattr(group_module, "ChildProcess")
    monkeypatch.delattr(group_module, "environment_store")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="has a process group"):
        Captioner.load(tensor_parallel=2)
    assert pair.caption(SAMPLES[0]).error is None


def test_after_an_interrupt_amid_a_step_calls_say_why_they_fail_and_a_service_joins_a_new_group(
    alone: Captioner, shared_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = shared_pair.open()
    with monkeypatch.context() as failing:
        ranks: Any = interrupted._engine._runner._runner._ranks.ranks  # type: ignore[attr-defined]
        failing.setattr(ranks, "sum", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            interrupted.caption(SAMPLES[0])
        with pytest.raises(RankError, match=r"^Rank 0 of 2 failed: Interrupted$"):
            interrupted.caption(SAMPLES[0])

    shared_pair.close()
    assert not shared_pair.ports(), "although the closed captioner still exists"
    pictures = [sample.read_bytes() for sample in SAMPLES]
    asks = [Ask(picture=picture, prompt=("Generate caption of this image", None)) for picture in pictures * 2]
    with closing(Service(lambda: Captioner.load(batch_size=4, tensor_parallel=2))) as service:
        service.start()
        service.wait_until_ready()
        answers = [service.submit(ask).result().text for ask in asks]  # the second time from the cache
    assert answers == texts(alone) * 2
