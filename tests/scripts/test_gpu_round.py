"""The round of measurements on a GPU, rehearsed on the CPU; what a second call runs."""

import dataclasses
import io
import json
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from pathlib import Path

import pytest

from scripts import bench_peers, gpu_round, gpu_trace
from scripts.gpu_round import TESTS, Outcome, State, Step, left, main, steps
from scripts.peers import rounds
from scripts.peers.processes import Children
from scripts.peers.rounds import Plan
from scripts.peers.table import Reply, Task

PASSED = Outcome(state="passed", seconds=1.0, time="", commit="", gpu="")
FAILED = dataclasses.replace(PASSED, state="failed", lines=("why",))
CUT = dataclasses.replace(PASSED, state="cut")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({}, ["a", "b", "c"]),
        ({"a": PASSED}, ["b", "c"]),
        ({"a": FAILED, "b": CUT, "c": PASSED}, ["b", "a"]),
        ({"a": PASSED, "b": PASSED, "c": PASSED, TESTS: PASSED}, ["a", "b", "c", TESTS]),  # a new round
        ({"a": FAILED, "b": CUT, "c": PASSED, TESTS: FAILED}, [TESTS, "b", "a"]),
    ],
)
def test_a_call_runs_the_tests_then_what_never_ended_then_what_failed(
    outcomes: dict[str, Outcome], expected: list[str]
) -> None:
    assert left(["a", "b", "c", TESTS], {TESTS: PASSED, **outcomes}) == expected


def told(out: Path) -> dict[str, tuple[str, list[str]]]:
    rows = json.loads((out / "gpu-round.json").read_text(encoding="utf-8"))["steps"]
    return {row["name"]: (row["state"], row["lines"]) for row in rows}


@pytest.mark.slow
def test_a_failed_and_a_cut_step_are_kept_with_their_lines_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "there"
    fails = f"import pathlib, sys; print('no file'); sys.exit(not pathlib.Path({str(file)!r}).exists())"

    def made_up(*, toy: bool, out: Path) -> tuple[Step, ...]:
        programs = {"fails": fails, "is cut": "print('round 1: the time is over')", "passes": "print('done')"}
        made = [Step(name=name, about=name, command=("-c", text), least_s=0.0) for name, text in programs.items()]
        measures = ("-c", "import sys; print(sys.argv[1:])", "--device", "cuda")
        return *made, Step(name="measures", about="and is shown", command=measures, least_s=0.0, is_shown=True)

    monkeypatch.setattr(gpu_round, "steps", made_up)

    first = main(["1", "--rehearse", "--out", str(tmp_path)])
    after_first = told(tmp_path)
    file.touch()
    second = main(["1", "--rehearse", "--out", str(tmp_path)])

    cut = ("cut", ["round 1: the time is over"])
    assert (first, second) == (1, 1)
    state, [line] = after_first.pop("measures")
    assert (state, line.rpartition(" ")[0]) == ("passed", "['--device', 'cuda', '--limit',")
    assert 1 <= int(line.rpartition(" ")[2].strip("']")) <= 60
    assert after_first == {"fails": ("failed", ["no file"]), "is cut": cut, "passes": ("passed", [])}
    assert told(tmp_path) == {
        "fails": ("passed", []),
        "is cut": cut,
        "passes": ("passed", []),
        "measures": (state, [line]),  # as it was
    }
    assert "| is cut | is cut | cut |" in (tmp_path / "gpu-round.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """Processes that measure, each of which loads its libraries once."""
    with closing(Children()) as children:
        yield children


class Lent:
    """The children, for one run that does not end them. The ceilings of a size are measured once."""

    def __init__(self, children: Children) -> None:
        self._children, self._ceilings = children, dict[str, Reply]()

    def __call__(self, task: Task) -> Reply:
        if task.engine.section != "machine":
            return self._children(task)
        if task.size not in self._ceilings:
            self._ceilings[task.size] = self._children(task)
        return self._ceilings[task.size]

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_the_round_rehearses_on_the_cpu(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_program, lent, ran = gpu_round._run, Lent(children), set[tuple[str, ...]]()

    def run(step: Step, left_s: float, *, toy: bool) -> tuple[State, float, tuple[str, ...]]:
        """Run the tests as a program, and the others in this process, with the same children.

        At toy size, 7B and 1B are the same command, which is run once.
        """
        if step.name == TESTS:
            return run_program(step, left_s, toy=toy)
        if step.command in ran:
            return "passed", 0.0, ()
        ran.add(step.command)
        (flag, program, *flags), said = step.command, io.StringIO()
        assert (flag, program) == ("-m", "scripts.gpu_trace" if step.is_shown else "scripts.bench_peers")
        with redirect_stdout(said):
            code = gpu_trace.main(flags) if step.is_shown else bench_peers.main([*flags, "--limit", f"{left_s:.0f}"])
        return "failed" if code else "passed", 0.0, tuple(said.getvalue().splitlines()) if step.is_shown else ()

    monkeypatch.setattr(gpu_round, "_run", run)
    monkeypatch.setattr(rounds, "Children", lambda: lent)

    code = main(["600", "--rehearse", "--out", str(tmp_path)])

    names = [step.name for step in steps(toy=False, out=tmp_path)]
    assert {name: state for name, (state, _) in told(tmp_path).items()} == dict.fromkeys(names, "passed")
    assert code == 0
    assert [line.split(" | ")[0] for line in told(tmp_path)["trace"][1] if " | " in line] == [
        "a step, rows: 1",
        "a prefill of 55 tokens each, prompts: 1",
        "the encoder, pictures: 1",
        "a job of 2 pictures, slots: 1",
    ]
    page = (tmp_path / "peers-h100.md").read_text(encoding="utf-8")
    assert "66 pictures in 64 slots" in page
    assert "### Decode, tiny, 1 thread on the host" in page


def test_the_page_is_of_one_kind_of_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("scripts.gpu_round.torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("scripts.gpu_round.torch.cuda.get_device_name", lambda index: "NVIDIA H200")

    assert main(["1"]) == 2
    assert "the page is of an NVIDIA H100" in capsys.readouterr().err


@pytest.mark.slow
def test_the_engines_of_a_gpu_run_in_one_process(children: Children, tmp_path: Path) -> None:
    plan = Plan(
        device="cuda", on="cpu", sizes=("tiny",), batch_sizes=(2,), job_sizes=(2,), work=str(tmp_path), budget=0.1
    )
    left_out = ("machine", "llama.cpp", "hf-compiled")  # the round measures the machine, and the others need a GPU
    tasks = [task for task in plan.tasks() if task.engine.program not in left_out]

    replies = [children(task) for task in tasks]

    assert [reply.reason for reply in replies if reply.problem] == []
    for task, reply in zip(tasks, replies, strict=True):
        assert [(one.engine, one.part, one.batch) for one in reply.figures] == [
            (task.engine.name, *rung) for rung in task.rungs
        ]
    assert all(figure.rate > 0 for reply in replies for figure in reply.figures)
    assert [name for name in children._children if "vision" not in name] == [" "]  # encoders have another one
