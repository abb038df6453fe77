"""The round of measurements on a GPU, rehearsed on the CPU; what a second call runs."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scripts import bench_peers, gpu_round, gpu_trace
from scripts.common import ROOT
from scripts.gpu_round import TESTS, Outcome, State, Step, left, main, steps
from scripts.peers import rounds
from scripts.peers.gpus import GPUS
from scripts.peers.processes import Children, _group
from scripts.peers.rounds import Plan
from scripts.peers.table import Reply, Task

PASSED = Outcome(about="", state="passed", seconds=1.0, time="", commit="", gpu="")
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


def told(out: Path, *, gpu: str = "h100") -> dict[str, tuple[str, list[str]]]:
    rows = json.loads((out / f"gpu-round-{gpu}.json").read_text(encoding="utf-8"))["steps"]
    return {row["name"]: (row["state"], row["lines"]) for row in rows}


NOISE = "USDT:2026-11-30 04:20:38 3877:3877 SyncActivityProfilerHandler.cpp:52] profiler_start"
LACKING = [
    f"round 1/2, {number}/9: 7B {name} [0.1 s]"
    for number, name in enumerate(("hf missing: transformers cannot be imported", "ours failed: ValueError: no"))
]


@pytest.mark.slow
def test_a_failed_and_a_cut_step_are_kept_with_their_lines_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "there"
    fails = f"import pathlib, sys; print(*range(20), sep='\\n'); sys.exit(not pathlib.Path({str(file)!r}).exists())"

    def made_up(gpu: str, **options: object) -> tuple[Step, ...]:
        programs = {"fails": fails, "is cut": "print('round 1: the time is over')", "passes": "print('done')"}
        made = [Step(name=name, about=name, command=("-c", text), least_s=0.0) for name, text in programs.items()]
        program = f"import sys; print(*range(34), {NOISE!r}, sys.argv[1:], sep='\\n')"
        measures = ("-c", program, "--device", "cuda")
        made += [Step(name="measures", about="and is shown", command=measures, least_s=0.0, is_shown=True)]
        lacks = ("-c", f"print(*{[LACKING[0], '7B ours 3/s', LACKING[1]]}, *range(99), sep='\\n')")
        made += [Step(name="lacks", about="peers", command=lacks, least_s=0.0)]
        fails_too = ("-c", f"print({NOISE!r}); exit(1)")
        return *made, Step(name="fails too", about="and is shown", command=fails_too, least_s=0.0, is_shown=True)

    monkeypatch.setattr(gpu_round, "steps", made_up)

    first = main(["1", "--rehearse", "--out", str(tmp_path)])
    after_first = told(tmp_path)
    file.touch()
    second = main(["1", "--rehearse", "--out", str(tmp_path)])

    cut, last = ("cut", ["round 1: the time is over"]), [str(number) for number in range(8, 20)]
    assert (first, second) == (1, 1)
    measures = state, [*numbers, line] = after_first.pop("measures")
    assert numbers == [str(number) for number in range(34)]
    assert (state, line.rpartition(" ")[0]) == ("passed", "['--device', 'cuda', '--limit',")
    assert 1 <= int(line.rpartition(" ")[2].strip("']")) <= 60
    others = {"passes": ("passed", []), "lacks": ("passed", LACKING), "fails too": ("failed", [NOISE])}
    assert after_first == {"fails": ("failed", last), "is cut": cut, **others}
    assert told(tmp_path) == {
        "fails": ("passed", []),
        "is cut": cut,
        **others,
        "measures": measures,  # as it was
    }
    assert "| is cut | is cut | cut |" in (tmp_path / "gpu-round-h100.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """Processes that measure, each of which loads its libraries once."""
    with closing(Children()) as children:
        yield children


class Lent:
    """The children, for one run that does not end them. The same ceilings of a size are measured once."""

    def __init__(self, children: Children) -> None:
        self._children, self._replies = children, dict[tuple[str, tuple[str, ...]], Reply]()

    def __call__(self, task: Task) -> Reply:
        if task.engine.section != "machine":
            return self._children(task)
        asked = task.size, task.ceilings
        if asked not in self._replies:
            self._replies[asked] = reply = self._children(task)
            assert reply.problem == "", reply.reason
            assert {figure.engine for figure in reply.figures} == {"read", *task.ceilings}
            assert all(figure.rate > 0 for figure in reply.figures)
        return self._replies[asked]

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_the_round_rehearses_on_the_cpu(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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
        flag, program, *flags = step.command
        if step.is_shown:
            assert (flag, program) == ("-m", "scripts.gpu_trace")
            capfd.readouterr()
            code = gpu_trace.main(flags)
            lines = [line for line in "".join(capfd.readouterr()).splitlines() if not gpu_round._PROFILER.match(line)]
            return "failed" if code else "passed", 0.0, tuple(lines)
        assert (flag, program) == ("-m", "scripts.bench_peers")
        return "failed" if bench_peers.main([*flags, "--limit", f"{left_s:.0f}"]) else "passed", 0.0, ()

    monkeypatch.setattr(gpu_round, "_run", run)
    monkeypatch.setattr(rounds, "Children", lambda: lent)

    code = main(["600", "--rehearse", "--out", str(tmp_path)])

    names = [step.name for step in steps("h100", toy=False, out=tmp_path)]
    assert {name: state for name, (state, _) in told(tmp_path).items()} == dict.fromkeys(names, "passed")
    assert code == 0
    lines = told(tmp_path)["trace"][1]
    assert len(lines) / 4 * 5 < gpu_round._SHOWN  # with more slots, there are five parts
    assert [line.split(" | ")[0] for line in lines if " | " in line] == [
        "a step, rows: 1",
        "a prefill of 55 tokens each, prompts: 1",
        "the encoder, pictures: 1",
        "a job of 2 pictures, slots: 1",
    ]
    lines = told(tmp_path)["long rows"][1]
    assert len(lines) * 2 < gpu_round._SHOWN  # with more slots, there are steps of one row too
    assert [line.split(" | ")[0] for line in lines if " | " in line] == [
        f"a step, rows: 1, places: 70 of 71, ours-bfloat16{kernels}" for kernels in ("", "-proposed")
    ]
    for context in (512, 2048):
        lines = told(tmp_path)[f"context {context}"][1]
        assert sum(f"places: 100 of {context}, ours-bfloat16" in line for line in lines) == 2
    page = (tmp_path / "peers-h100.md").read_text(encoding="utf-8")
    assert "66 pictures in 64 slots" in page
    assert "### Decode, tiny, 1 thread on the host" in page


@pytest.mark.parametrize("gpu", GPUS)
def test_the_pages_are_those_of_the_gpu_that_is_there(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, commands = f"NVIDIA {gpu.upper()}", list[tuple[str, ...]]()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: name)

    def run(step: Step, left_s: float, *, toy: bool) -> tuple[State, float, tuple[str, ...]]:
        commands.append(step.command)
        return "passed", 1.0, ()

    monkeypatch.setattr(gpu_round, "_run", run)
    monkeypatch.setattr(gpu_round, "unpack", lambda: None)

    assert main(["600", "--out", str(tmp_path)]) == 0

    assert commands == [step.command for step in steps(gpu, toy=False, out=tmp_path)]
    measured = [command for command in commands if "scripts.bench_peers" in command]
    assert {command[command.index("--processor") + 1] for command in measured} == {gpu}
    assert {path.stem for path in tmp_path.iterdir()} == {f"gpu-round-{gpu}"}
    page = (tmp_path / f"gpu-round-{gpu}.md").read_text(encoding="utf-8")
    assert f"[the page of the {name}](peers-{gpu}.md)" in page
    assert f"| passed | 1 | {name} |" in page


def test_an_earlier_commit_is_measured_behind_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = list[tuple[str, ...]]()

    def run(step: Step, left_s: float, *, toy: bool) -> tuple[State, float, tuple[str, ...]]:
        commands.append(step.command)
        return "passed", 1.0, ()

    monkeypatch.setattr(gpu_round, "_run", run)
    flags = ["600", "--rehearse", "--out", str(tmp_path / "out")]
    (tmp_path / "scripts").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([*flags, "--before", "abc", str(tmp_path)])
    assert f"{tmp_path} has no scripts/bench_peers.py" in capsys.readouterr().err
    (tmp_path / "scripts/bench_peers.py").touch()

    for commit in ("abc", "abd"):
        assert main([*flags, "--before", commit, str(tmp_path)]) == 0
    assert main(flags) == 0

    whole = [step.command for step in steps("h100", toy=True, out=tmp_path / "out")]
    earlier = [command for command in commands if command not in whole]
    assert [command[:4] for command in earlier] == [
        ("-m", "scripts.gpu_before", commit, str(tmp_path)) for commit in ("abc", "abd")
    ]
    assert {"--device", "cuda", "h100", "ours-bfloat16", "ours-int8", "ours-int4"} < {*earlier[0]}
    assert commands == [whole[0], earlier[0], *whole[1:], earlier[1], *whole]
    names = [step.name for step in steps("h100", toy=True, out=tmp_path)]
    assert [*told(tmp_path / "out")] == [*names, "before abd", "before abc"]  # the page keeps what was measured


def test_wheels_of_another_time_go_and_the_machine_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    def download(command: list[str], *, check: bool) -> None:
        asked.extend(command)
        for name in ("gguf-0.19.0-py3-none-any", "huggingface_hub-2.4.0-py3-none-any", "torch-2.13.0-cp312"):
            (tmp_path / f"{name}.whl").write_bytes(b"12345")

    monkeypatch.setattr(gpu_round, "WHEELS", tmp_path)
    monkeypatch.setattr(subprocess, "run", download)
    (tmp_path / "gguf-0.18.0-py3-none-any.whl").touch()

    assert gpu_round.pack("3.12") == 5

    assert [path.name for path in tmp_path.iterdir()] == ["gguf-0.19.0-py3-none-any.whl"]
    names = {re.split("[>=]", word)[0] for word in asked}
    assert {"gguf", "fastapi", "pytest-xdist", "httpx"} < names
    assert (
        names & {"torch", "numpy", "pillow", "sentencepiece", "safetensors", "huggingface_hub", "tokenizers"} == set()
    )


def test_without_such_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert main(["1"]) == 2
    assert "pages are of an NVIDIA H100 or H200, and torch" in capsys.readouterr().err


@pytest.mark.slow
def test_tests_of_a_gpu_are_collected_without_one() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout
    names = {path.name for path in (ROOT / "tests/cuda").glob("test_*.py")}
    assert {line.partition("::")[0].partition(":")[0].rpartition("/")[2] for line in done.stdout.split()} >= names


@pytest.mark.slow
def test_the_engines_of_a_gpu_run_in_one_process(children: Children, tmp_path: Path) -> None:
    plan = Plan(
        device="cuda", on="cpu", sizes=("tiny",), batch_sizes=(2,), job_sizes=(2,), work=str(tmp_path), budget=0.1
    )
    machine, *tasks = (task for task in plan.tasks() if task.engine.program not in ("llama.cpp", "hf-compiled", "vllm"))
    machines = machine, next(dataclasses.replace(plan, sizes=("vit-tiny",)).tasks())

    ceilings, replies = [children(task) for task in machines], [children(task) for task in tasks]

    assert [reply.reason for reply in (*ceilings, *replies) if reply.problem] == []
    matmuls = ("bfloat16 float16 int8 int4", "bfloat16 float16 float32")
    assert [{figure.engine for figure in reply.figures} for reply in ceilings] == [
        {"read", *(f"matmul-{name}" for name in names.split())} for names in matmuls
    ]
    for task, reply in zip(tasks, replies, strict=True):
        assert [(one.engine, one.part, one.batch) for one in reply.figures] == [
            (task.engine.name, *rung) for rung in task.rungs
        ]
    assert all(figure.rate > 0 for reply in (*ceilings, *replies) for figure in reply.figures)
    assert {_group(task) for task in tasks if task.engine.section == "job"} == {" "}
    assert set(children._children) <= {" ", " vision"}  # encoders have a process of their own
