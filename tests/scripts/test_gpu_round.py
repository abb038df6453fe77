"""The round of measurements on a GPU, rehearsed on the CPU; its traces; figures of another checkout beside these."""

import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.runners.base import Runner
from scripts import bench_peers, gpu_before, gpu_round, gpu_trace
from scripts.bench_peers import load, save
from scripts.common import ROOT
from scripts.gpu_round import TESTS, Outcome, State, Step, left, main, steps
from scripts.gpu_trace import Span, parts_of, summary
from scripts.peers import rounds
from scripts.peers.gpus import GPUS
from scripts.peers.ours import OurDecoder, open_parts
from scripts.peers.processes import Children, _group
from scripts.peers.results import Missing, Results, Row
from scripts.peers.rounds import Plan
from scripts.peers.table import Reply, Task

PASSED = Outcome(about="", state="passed", seconds=1.0, time="", commit="", gpu="")
FAILED = replace(PASSED, state="failed", lines=("why",))
CUT = replace(PASSED, state="cut")


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
        hangs = ("-c", "import time; time.sleep(600)")
        made += [Step(name="hangs", about="for ever", command=hangs, least_s=0.0, most_s=0.5)]
        fails_too = ("-c", f"print({NOISE!r}); exit(1)")
        return *made, Step(name="fails too", about="and is shown", command=fails_too, least_s=0.0, is_shown=True)

    monkeypatch.setattr(gpu_round, "steps", made_up)
    monkeypatch.setattr(gpu_round, "_GRACE_S", 0.0)

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
    others = {
        "passes": ("passed", []),
        "hangs": ("cut", []),
        "lacks": ("passed", LACKING),
        "fails too": ("failed", [NOISE]),
    }
    assert after_first == {"fails": ("failed", last), "is cut": cut, **others}
    assert told(tmp_path) == {"fails": ("passed", []), "is cut": cut, **others, "measures": measures}
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


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands of steps, all of which pass without being run."""
    commands = list[tuple[str, ...]]()

    def run(step: Step, left_s: float, *, toy: bool) -> tuple[State, float, tuple[str, ...]]:
        commands.append(step.command)
        return "passed", 1.0, ()

    monkeypatch.setattr(gpu_round, "_run", run)
    return commands


@pytest.mark.parametrize("gpu", GPUS)
def test_the_pages_are_those_of_the_gpu_that_is_there(
    gpu: str, commands: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"NVIDIA {gpu.upper()}"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: name)
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
    commands: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert not names & {"torch", "numpy", "pillow", "sentencepiece", "safetensors", "huggingface_hub", "tokenizers"}


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
    machines = machine, next(replace(plan, sizes=("vit-tiny",)).tasks())

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


def test_gaps_are_the_time_in_which_no_kernel_runs() -> None:
    spans = [Span("b", 5000, 6000), Span("a", 0, 2000), Span("a", 1000, 3000), Span("b", 5500, 5600)]

    assert list(summary("a step", spans)) == [
        "a step | 6.00 ms, busy 66.7%, 4 kernels, longest gap 2.000 ms",
        "      4.000 ms  66.7%      2 x a",
        "      1.100 ms  18.3%      2 x b",
    ]


def test_parts_are_of_a_quarter_of_the_slots_and_of_all() -> None:
    assert [name for name, _ in parts_of("tiny", "vit-tiny", slots=8, device="cpu")] == [
        "a step, rows: 2",
        "a step, rows: 8",
        "a prefill of 55 tokens each, prompts: 2",
        "the encoder, pictures: 2",
        "a job of 16 pictures, slots: 8",
    ]


@pytest.mark.parametrize(
    ("flags", "count", "context"), [((), 4, 71), (("--slots", "3"), 3, 71), (("--context", "128"), 4, 128)]
)
def test_long_steps_are_of_one_row_and_of_all_slots_by_both_kernels(
    flags: tuple[str, ...],
    count: int,
    context: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps, opened = list[tuple[int, int]](), list[weakref.ref[Runner]]()

    def step(self: OurDecoder, ids: list[int], place: int) -> list[int]:
        steps.append((len(ids), place))
        return decode(self, ids, place)

    def open_alone(config: DecoderConfig, *rest: Any, **options: Any) -> Parts:
        assert config.context == context
        assert [runner() for runner in opened] == [None] * len(opened), "a model before this one still takes memory"
        parts = open_parts(config, *rest, **options)
        opened.append(weakref.ref(parts.runner))
        return parts

    def traced(call: Callable[[], object], *, device: str) -> list[Span]:
        call()
        return [Span(device, 0, 1)]

    decode = OurDecoder.step
    monkeypatch.setattr(OurDecoder, "step", step)
    monkeypatch.setattr(gpu_trace, "open_parts", open_alone)
    monkeypatch.setattr(gpu_trace, "traced", traced)

    assert gpu_trace.main(["--decoder", "tiny", "--encoder", "vit-tiny", "--on", "cpu", "--places", "70", *flags]) == 0

    parts = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert parts == [
        f"a step, rows: {rows}, places: 70 of {context}, ours-bfloat16{kernels}"
        for kernels in ("", "-proposed")
        for rows in (1, count)
    ]
    assert steps == [(1, 70), (count, 70)] * 2


@pytest.mark.parametrize("flags", [("--context", "512"), ("--places", "70", "--context", "70")])
def test_a_context_holds_the_places_and_the_step(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_trace.main(flags)

    assert "it needs --places, and must be larger than these" in capsys.readouterr().err


OWN = Row(part="decode", engine="ours-bfloat16", size="7B", batch=1, threads=8, run="now", rates=(4.0,))
WITHOUT_INT8 = Missing(engine="ours-int8", size="7B", section="decode", threads=8, problem="missing", reason="none")
FLAGS = ["--device", "cuda", "--sizes", "7B", "1B", "--engines", "ours-bfloat16"]
NOTHING = Results(processor="h200")


class MadeUp:
    """A benchmark that has `figures` after a while, and has ended with `code` after another, or is cut there."""

    def __init__(self, command: list[str], *, cwd: Path, figures: bool = True, code: int | None = 0) -> None:
        assert cwd == Path("other")
        start, (folder, *flags) = command[:6], command[6:]
        assert start == [sys.executable, "-m", "scripts.bench_peers", "--processor", "h200", "--out"]
        assert flags == ["--limit", "70", *FLAGS]
        self._folder, self._figures, self._code, self._num_waits = Path(folder), figures, code, 0

    def __enter__(self) -> "MadeUp":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float) -> int:
        self._num_waits += 1
        if self._num_waits == 3 and self._code is not None:
            return self._code
        if self._num_waits == 3:
            raise KeyboardInterrupt
        if self._num_waits == 2 and self._figures:
            rows = replace(OWN, run="then", rates=(2.0,)), replace(OWN, part="ceiling", engine="read", run="then")
            save(replace(NOTHING, runs={"then": {"commit": "HEAD"}}, rows=rows, missing=(WITHOUT_INT8,)), self._folder)
        raise subprocess.TimeoutExpired("it", timeout)


@pytest.mark.parametrize(("figures", "code"), [(True, 0), (False, 1), (True, None)])
def test_engines_of_another_checkout_are_called_before(
    figures: bool, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(command: list[str], *, cwd: Path) -> Any:
        return MadeUp(command, cwd=cwd, figures=figures, code=code)

    save(replace(NOTHING, runs={"now": {"commit": "HEAD"}}, rows=(OWN,)), tmp_path)
    monkeypatch.setattr(subprocess, "Popen", opened)
    arguments = ["abc", "other", *FLAGS, "--processor", "h200", "--limit", "90", "--out", str(tmp_path)]

    if code is None:
        with pytest.raises(KeyboardInterrupt):
            gpu_before.main(arguments)
    else:
        assert gpu_before.main(arguments) == code

    found = load(tmp_path, NOTHING)
    earlier = [("ours-bfloat16-before", "then")] if figures else []
    assert [(row.engine, row.run) for row in found.rows] == [("ours-bfloat16", "now"), *earlier]
    assert [run["commit"] for run in found.runs.values()] == ["HEAD", "abc"][: 1 + figures]
    assert found.missing == ((replace(WITHOUT_INT8, engine="ours-int8-before"),) if figures else ())
    page = (tmp_path / "peers-h200.md").read_text(encoding="utf-8")
    assert ("\n| ours-bfloat16-before | 2.00 |\n" in page) == figures  # ours is twice as fast
