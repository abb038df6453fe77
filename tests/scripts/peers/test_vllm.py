"""vLLM's engine as a peer: a made-up vLLM with the calls of its engine, whose rows count their tokens."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.peers.measuring import measure_decoder
from scripts.peers.packages import MissingPackage
from scripts.peers.vllm import Vllm


class MadeUpEngine:
    """Each step gives every row a token, ten times its number of tokens plus its prompt's first one.

    With `is_late`, the outputs of a step are those of the step before.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late, self.running, self.seen = is_late, dict[str, list[int]](), set[str]()
        self._unread: list[Any] = []
        self.num_steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert name not in self.seen
        self.seen.add(name)
        self.running[name] = [prompt["prompt_token_ids"][0]]
        assert (sampling.temperature, sampling.ignore_eos, sampling.detokenize) == (0.0, True, False)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.num_steps += 1
        for tokens in self.running.values():
            tokens.append(10 * len(tokens) + tokens[0])
        made = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens[1:])])
            for name, tokens in self.running.items()
        ]
        told, self._unread = (self._unread, made) if self._is_late else (made, [])
        return told


@pytest.fixture(params=[False, True], ids=["at once", "a step late"])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Vllm, MadeUpEngine]:
    engine, options = MadeUpEngine(is_late=request.param), dict[str, Any]()

    def opened(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(llm_engine=engine)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=opened, SamplingParams=SimpleNamespace))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    ours = Vllm(Path("folder"), num_rows=64, dtype="bfloat16")
    assert options["model"] == "folder"
    switches = [options[name] for name in ("load_format", "skip_tokenizer_init", "enable_prefix_caching")]
    assert switches == ["dummy", True, False]
    assert options["max_num_batched_tokens"] >= 64 * 55
    return ours, engine


def test_rows_go_on_by_a_token_each_step(vllm: tuple[Vllm, MadeUpEngine]) -> None:
    ours, engine = vllm

    assert ours.prefill([[7, 1], [8, 1]]) == [17, 18]
    assert ours.step([0, 0], 2) == [27, 28]
    assert ours.step([0, 0], 3) == [37, 38]
    assert ours.prefill([[4, 1]]) == [14]
    ours.spread(3)
    assert ours.step([0] * 3, 2) == [24] * 3
    assert len(engine.running) == 3


def test_rows_that_have_ended_are_an_error(vllm: tuple[Vllm, MadeUpEngine]) -> None:
    ours, engine = vllm
    ours.prefill([[7, 1]])
    engine.running.clear()

    with pytest.raises(RuntimeError, match="ended all rows before token 2"):
        ours.step([0], 2)


def test_it_is_measured_as_the_others(vllm: tuple[Vllm, MadeUpEngine]) -> None:
    ours, engine = vllm
    rungs = [("prefill", 2), ("decode", 2), ("decode", 5)]

    figures = list(measure_decoder(ours, rungs, num_steps=4, budget_s=9.0, rehearse=True))  # type: ignore[arg-type]

    assert [(one.part, one.batch) for one in figures] == rungs
    assert len(engine.running) == 5


def test_without_the_package_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(MissingPackage, match=r"vllm cannot be imported .*: install a vllm for this torch"):
        Vllm(Path("folder"), num_rows=1, dtype="bfloat16")
