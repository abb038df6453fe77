"""The rounds of a benchmark, their results and goals, with made-up replies."""

import os
import re
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.runtime.devices import triton_calls
from llama_adapter.runtime.devices.triton_calls import TUNINGS, Tuning
from scripts import gpu_round
from scripts.bench_peers import load, main, parse, save
from scripts.common import DOCS
from scripts.pages.render import PAGES, read, render
from scripts.peers import processes
from scripts.peers.child import OPENERS, answer
from scripts.peers.goals import GOALS, Goal, reached
from scripts.peers.gpus import GPUS, gpu_here
from scripts.peers.measuring import MemoryReader, measure_decoder, median_of_warm
from scripts.peers.packages import MissingPackage
from scripts.peers.processes import run_child
from scripts.peers.report import share_of
from scripts.peers.results import Missing, Results, Row
from scripts.peers.rounds import Plan, run_rounds
from scripts.peers.sizes import DECODERS, ENCODERS, place_of
from scripts.peers.table import ENGINES, MACHINES, Figure, Reply, Rung, Task, chosen_engines
from scripts.peers.targets import TARGETS, Target, check

OURS_INT8, HUGGING_FACE = (chosen_engines([name], "decode")[0] for name in ("ours-int8", "hf-float32"))
TASK = Task(engine=HUGGING_FACE, size="tiny", work="work", threads=1, rungs=(("decode", 1), ("decode", 2)))


def row(engine: str, rates: tuple[float, ...], **changes: Any) -> Row:
    values = {"part": "decode", "size": "1B", "batch": 1, "threads": 1, "run": "first", **changes}
    return Row(engine=engine, rates=rates, **values)


def results(*rows: Row, **runs: Any) -> Results:
    return Results(runs={"first": {}, **runs}, rows=rows)


class MadeUp:
    """Answers every task with a rate for each of its figures; each took `spent_s` seconds."""

    def __init__(self, *, problems: dict[str, Reply] | None = None, spent_s: float = 1.0) -> None:
        self.tasks: list[Task] = []
        self._problems, self._spent_s = problems or {}, spent_s

    def __call__(self, task: Task) -> Reply:
        self.tasks.append(task)
        if task.only_files and task.engine.name not in self._problems:
            place = place_of(task.engine.file, work=Path(task.work), size=task.size)
            place.parent.mkdir(exist_ok=True)
            place.touch()
            return Reply()
        name = task.engine.name
        if name in self._problems:
            return self._problems[name]
        return Reply(
            figures=[
                Figure(engine=name, part=part, batch=batch, rate=2.0, spent_s=self._spent_s * batch)
                for part, batch in task.rungs
            ]
        )


def rounds_of(tmp_path: Path, made_up: MadeUp, **changes: Any) -> Results:
    """The results of two rounds of decoders of the size tiny, without `changes` of the plan."""
    usual = {"sections": ("decode",), "sizes": ("tiny",), "engines": ("ours-float32", "hf-float32"), "rounds": 2}
    plan = Plan(**usual | {"work": str(tmp_path), "long": 4.0} | changes)
    return run_rounds(plan, tell=lambda line: None, keep=lambda results: None, run=made_up)


def test_engines_run_in_turn_and_long_figures_are_not_repeated(tmp_path: Path) -> None:
    made_up = MadeUp()

    found = rounds_of(tmp_path, made_up)

    assert [task.engine.name for task in made_up.tasks] == ["machine", "ours-float32", "hf-float32"] * 2
    assert {one.batch: len(one.rates) for one in found.rows if one.part == "decode"} == {1: 2, 5: 1, 16: 1}

    all_long = MadeUp(spent_s=5.0)
    rounds_of(tmp_path, all_long)
    assert len(all_long.tasks) == 3


def test_files_are_made_before_the_rounds_by_processes_that_measure_nothing(tmp_path: Path) -> None:
    made_up = MadeUp(problems={"llama.cpp-q8_0": Reply(problem="missing", reason="no llama.cpp")})
    engines = ("llama.cpp-bf16", "llama.cpp-q8_0")

    found = [rounds_of(tmp_path, made_up, engines=engines, rounds=1, threads=3) for _ in range(2)]

    files = [("llama.cpp-bf16", True), ("llama.cpp-q8_0", True)]
    measured = [("machine", False), ("llama.cpp-bf16", False)]
    assert [(task.engine.name, task.only_files) for task in made_up.tasks] == [*files, *measured, files[1], *measured]
    assert [task.threads for task in made_up.tasks[:3]] == [os.cpu_count(), os.cpu_count(), 3]
    assert [one.engine for one in found[0].missing] == ["llama.cpp-q8_0"]


def test_a_file_that_cannot_be_made_is_tried_once_for_all_engines_that_run_it(tmp_path: Path) -> None:
    engines = ("onnxruntime-float32", "openvino-float32")
    made_up = MadeUp(problems={name: Reply(problem="missing", reason="no ONNX") for name in engines})

    found = rounds_of(tmp_path, made_up, sections=("vision",), sizes=("ViT-L/14",) * 2, engines=engines)

    tried = [task.engine.name for task in made_up.tasks if task.engine.name != "machine"]
    assert tried == ["onnxruntime-float32"]
    assert [(one.engine, one.reason) for one in found.missing] == [(name, "no ONNX") for name in engines]


@pytest.mark.parametrize("problem", ["missing", "failed"])
def test_failed_engine_is_listed_and_stops_nothing(tmp_path: Path, problem: Any) -> None:
    made_up = MadeUp(problems={"hf-float32": Reply(problem=problem, reason=f"no luck in {tmp_path}, {sys.prefix}")})

    found = rounds_of(tmp_path, made_up)

    assert [(one.engine, one.problem, one.reason) for one in found.missing] == [
        ("hf-float32", problem, "no luck in WORK, PYTHON")
    ]
    assert {one.engine for one in found.rows} == {"machine", "ours-float32"}
    assert "no luck in WORK, PYTHON" in render("peers", asdict(found))


def test_missing_packages_and_failures_are_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(task: Task) -> None:
        raise RuntimeError("it broke\nin two lines")

    monkeypatch.setitem(sys.modules, "transformers", None)
    reply = answer(TASK)
    assert reply.problem == "missing"
    assert re.search("transformers cannot be imported .* extra `peers`", reply.reason)
    monkeypatch.setattr("scripts.peers.child.OPENERS", {("decode", "hf-dynamic"): broken})
    assert answer(TASK) == Reply(problem="failed", reason="RuntimeError: it broke")
    assert answer(replace(TASK, only_files=True, engine=replace(HUGGING_FACE, file="no file"))).problem == "failed"


def test_int8_is_not_measured_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llama_adapter.runtime.devices.CpuBackend.computes_in",
        lambda self, precision, activations, **more: precision == "float",
    )

    reply = answer(replace(TASK, engine=OURS_INT8))

    assert (reply.problem, reply.figures) == ("missing", [])
    assert "widened" in reply.reason


def test_new_run_replaces_what_it_measures_only(tmp_path: Path) -> None:
    before = results(row("hf-float32", (1.0,)), row("ours-float32", (2.0,)))
    after = Results(runs={"second": {}}, rows=(row("ours-float32", (3.0, 4.0), run="second"),))
    everything = Results(runs={"third": {}}, rows=tuple(replace(one, run="third") for one in before.rows))
    save(before, tmp_path)
    save(load(tmp_path, Results()).merged(after), tmp_path)

    merged = load(tmp_path, Results())
    assert [(one.engine, one.rates) for one in merged.rows] == [("hf-float32", (1.0,)), ("ours-float32", (3.0, 4.0))]
    assert set(merged.runs) == {"first", "second"}
    assert set(before.merged(everything).runs) == {"third"}  # a run without rows is dropped
    # An engine that is measured is no longer missing.
    gone = Missing(engine="hf-float32", size="1B", section="decode", threads=1, problem="missing", reason="none")
    lacking = replace(results(), missing=(gone,))
    assert lacking.merged(results()).missing == (gone,)
    assert lacking.merged(results(row("hf-float32", (1.0,)))).missing == ()


def test_figures_of_another_processor_have_a_page_of_their_own(tmp_path: Path) -> None:
    other = Results(processor="zen4")
    save(results(row("ours-float32", (2.0,))), tmp_path)
    save(load(tmp_path, other).merged(results(row("ours-float32", (1.0,)))), tmp_path)

    assert [load(tmp_path, one).rows[0].rates for one in (Results(), other)] == [(2.0,), (1.0,)]
    assert load(tmp_path, other).processor == "zen4"
    assert "--processor zen4" in (tmp_path / "peers-zen4.md").read_text()


def test_target_is_a_ratio_of_medians_to_the_best_peer() -> None:
    target = Target(part="decode", ours="ours-int8", peers=("slow", "fast", "absent"), size="1B", batch=1, wanted=1.5)
    found = results(row("ours-int8", (9.0, 30.0, 28.0)), row("slow", (5.0,)), row("fast", (20.0, 10.0, 21.0)))

    reached = check(target, found, threads=1)

    assert reached.peer.engine == "fast"
    assert reached.ratio == pytest.approx(28.0 / 20.0)
    assert reached.is_met is False
    assert check(replace(target, wanted=1.4), found, threads=1).is_met is True
    assert check(target, results(row("ours-int8", (1.0,))), threads=1).is_met is None  # there are no figures
    assert check(target, found, threads=2).is_met is None


def test_targets_name_measured_engines_and_all_can_be_opened() -> None:
    measured = {(engine.device, engine.section, engine.name) for engine in ENGINES}

    for target in TARGETS:
        section = "decode" if target.part == "prefill" else target.part
        assert {("cpu", section, one) for one in (target.ours, *target.peers)} <= measured
        assert set(target.size.split("+")) <= {*DECODERS, *ENCODERS, "embedded"}
    assert {(engine.section, engine.program) for engine in (*ENGINES, *MACHINES.values())} == set(OPENERS)


def test_page_marks_missed_targets_their_bound_and_other_runs() -> None:
    # 1.26 billion weights in bfloat16 are 2.5 GB: 10 steps per second read 25 GB/s of the available 30 GB/s.
    found = results(
        row("ours-bfloat16", (10.0,)),
        row("llama.cpp-bf16", (12.5,)),
        row("read", (30e9,), part="ceiling"),
        row("matmul-bfloat16", (300e9,), part="ceiling"),
    )

    page = render("peers", asdict(found))

    assert "| 1B decode, batch 1 | ours-bfloat16 | llama.cpp-bf16 | 1.0x | 0.80x | **missed** | memory: 8" in page
    share = share_of(found.rows[0], found)
    assert share.memory == pytest.approx(0.81, abs=0.04)
    assert share_of(found.rows[1], found) is None

    apart = results(row("ours-float32", (10.0,)), row("hf-float32", (5.0,), run="second"), second={})
    assert "hf-float32 (another run)" in render("peers", asdict(apart))


def test_shares_use_ceilings_of_the_same_run() -> None:
    ceilings = {"read": 30e9, "matmul-float32": 300e9}
    before = results(
        row("ours-float32", (1.0,)), *(row(name, (rate,), part="ceiling") for name, rate in ceilings.items())
    )
    lower = (row(name, (rate / 2,), part="ceiling", run="second") for name, rate in ceilings.items())
    after = Results(runs={"second": {}}, rows=(row("hf-float32", (1.0,), run="second"), *lower))

    merged = before.merged(after)

    assert share_of(merged.rows[0], merged) == share_of(before.rows[0], before) is not None

    again = replace(after, rows=(row("ours-float32", (2.0,), run="second"), *after.rows))
    assert {one.run for one in before.merged(again).rows} == {"second"}


def test_a_share_is_of_the_bandwidth_between_steps_and_the_head_of_4_bits_counts_as_its_run_says() -> None:
    ceilings = (row("read", (80e9,), part="ceiling"), row("matmul-int4", (1e12,), part="ceiling"))
    beside = row("ours-int4", (30.0, 10.0), reads=(60e9, 20e9))  # a third of the bandwidth in the second round
    alone = replace(beside, reads=())
    earlier = results(alone, *ceilings)
    later = replace(earlier, runs={"first": {"settings": {"int4_head": "int8"}}})

    shares = [share_of(beside, results(beside, *ceilings)), *(share_of(alone, each) for each in (earlier, later))]

    assert shares[0].memory / shares[1].memory == pytest.approx((30 / 60) / (20 / 80))
    more = 2048 * 32000 * (8 - 4.5) / 8  # bytes of the head of 1B
    assert shares[2].memory - shares[1].memory == pytest.approx(20.0 * more / 80e9)


def test_run_without_any_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MadeUp(problems={"hf-float32": Reply(problem="failed", reason="no luck")})
    monkeypatch.setattr("scripts.peers.rounds.run_child", broken)
    flags = ["--sizes", "tiny", "--sections", "decode", "--rounds", "1"]
    places = ["--work", str(tmp_path), "--out", str(tmp_path)]

    assert main([*flags, *places, "--engines", "hf-float32"]) == 1
    assert main([*flags, *places, "--engines", "ours-float32"]) == 0


def test_flags_replace_fields_of_the_plan(tmp_path: Path) -> None:
    assert parse([]) == (Plan(), DOCS)
    flags = f"--batch-sizes 2 3 --budget 0.5 --threads 2 --device cuda --out {tmp_path}"
    assert parse(flags.split()) == (Plan(batch_sizes=(2, 3), budget=0.5, threads=2, device="cuda"), tmp_path)


@pytest.mark.parametrize(
    "flags", ["--rounds 0", "--budget nan", "--threads 0", "--batch-sizes 1 -1", "--sizes 2B", "--device tpu"]
)
def test_invalid_flags_are_usage_errors(flags: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())


class Counting:
    """A decoder that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def prefill(self, prompts: Any) -> list[int]:
        self.calls.append(("prefill", len(prompts)))
        return [1] * len(prompts)

    def spread(self, num_rows: int) -> None:
        self.calls.append(("spread", num_rows))

    def step(self, token_ids: Any, position: int) -> list[int]:
        self.calls.append(("step", len(token_ids)))
        return list(token_ids)


def test_rows_are_copied_if_prefill_is_not_measured() -> None:
    engine = Counting()

    rungs = [("prefill", 1), ("decode", 1), ("decode", 16)]
    figures = list(measure_decoder(engine, rungs, num_steps=5, budget_s=0.0, reader=MemoryReader(num_threads=2)))

    assert [(figure.part, figure.batch) for figure in figures] == [("prefill", 1), ("decode", 1), ("decode", 16)]
    assert ("prefill", 16) not in engine.calls
    assert engine.calls.count(("spread", 16)) == 1
    assert engine.calls.count(("step", 16)) == 5  # one warm-up step and four measured ones, the minimum


def test_rehearsed_figures_are_of_calls_that_ran_before() -> None:
    engine = Counting()

    list(measure_decoder(engine, [("prefill", 4), ("decode", 4)], num_steps=5, budget_s=9.0, rehearse=True))

    steps = [("step", 4)] * 6  # one warm-up step and five measured ones
    refill = [("prefill", 1), ("spread", 4)]
    assert engine.calls == [*[("prefill", 4)] * 8, *steps, *refill, *steps]


def test_first_call_is_a_warm_up_unless_there_are_few() -> None:
    assert median_of_warm([9.0, 1.0, 2.0, 3.0]) == 2.0
    assert median_of_warm([4.0, 2.0]) == 3.0


GPU_PLAN = Plan(device="cuda", sizes=("7B", "1B", "ViT-L/14"), batch_sizes=(1, 5, 16, 64), job_sizes=(5, 64))


@pytest.mark.parametrize(
    ("changes", "ceilings"),
    [
        ({}, {"7B": "bfloat16 int4 int8 float16", "ViT-L/14": "float32 bfloat16 float16"}),
        ({"sections": ("decode",)}, {"7B": "bfloat16 int4 int8 float16", "ViT-L/14": ""}),
        ({"sections": ("job",)}, {"7B": "", "ViT-L/14": ""}),
        ({"engines": ("hf-float16", "ours-int8-proposed")}, {"7B": "int8", "ViT-L/14": ""}),
        (
            {"device": "cpu", "engines": ("hf-float32", "ours-int4", "ours-float32")},
            {"7B": "float32 int4", "ViT-L/14": "float32 int4"},
        ),
    ],
)
def test_ceilings_of_a_size_are_those_of_our_engines(changes: dict[str, Any], ceilings: dict[str, str]) -> None:
    tasks = replace(GPU_PLAN, sizes=tuple(ceilings), **changes).tasks()

    found = {task.size: set(task.ceilings) for task in tasks if task.engine.name == "machine"}
    assert found == {size: {f"matmul-{name}" for name in names.split()} for size, names in ceilings.items()}


def test_engines_of_a_gpu_run_by_importance() -> None:
    tasks = list(GPU_PLAN.tasks())

    assert {task.device for task in tasks} == {"cuda"}
    sections = [(task.size, task.engine.section) for task in tasks if task.engine.section != "machine"]
    jobs = ("7B+ViT-L/14", "job")
    assert list(dict.fromkeys(sections)) == [("7B", "decode"), ("1B", "decode"), ("ViT-L/14", "vision"), jobs]
    assert {task.size for task in tasks if task.engine.program == "llama.cpp"} == {"1B"}
    compiled = next(task for task in tasks if task.engine.program == "hf-compiled")
    assert compiled.rungs == (("decode", 1), ("decode", 16), ("decode", 5), ("decode", 64))
    # The CPU can stand in for a GPU.
    assert {task.device for task in replace(GPU_PLAN, on="cpu").tasks()} == {"cpu"}


def test_a_run_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr("scripts.peers.rounds.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    kept: list[Results] = []
    made_up = MadeUp(problems={"ours-bfloat16": Reply(problem="failed", reason="took longer than 40 s")})
    plan = replace(GPU_PLAN, sizes=("tiny",), work=str(tmp_path), limit=130.0)

    found = run_rounds(plan, tell=lambda line: None, keep=kept.append, run=made_up)

    assert [(task.engine.name, task.timeout_s) for task in made_up.tasks] == [
        ("machine", 100.0),
        ("ours-bfloat16", 40.0),
    ]
    assert found.missing == ()  # the end of the run is not a failure of the engine
    assert [len(one.rows) for one in kept] == [1, 1]


def test_page_of_a_gpu_names_it_and_the_page_of_its_goals() -> None:
    gpu = {"gpu": "NVIDIA H200", "driver": "", "cuda": "13.0", "cpu": "a processor"}
    rows = [
        *(row(name, (rate,), size="7B") for name, rate in (("ours-bfloat16", 120.0), ("hf-bfloat16", 60.0))),
        *(row(name, (rate,), part="ceiling", size="7B") for name, rate in (("read", 3e12), ("matmul-bfloat16", 8e14))),
    ]
    found = replace(results(*rows), runs={"first": gpu}, processor="h200")

    page = render(found.page, asdict(found))

    assert "| ours-bfloat16 | 120.0 (one round) | 5" in page
    assert "\n| hf-bfloat16 | 2.00 |\n" in page
    assert "targets are reached" not in page
    assert page.startswith("# Comparison with other programs, NVIDIA H200\n")
    assert "--processor h200`" in page
    assert "- **Goals** are on the page of [its rounds](gpu-round-h200.md).\n" in page
    assert "NVIDIA H200, driver unknown, CUDA 13.0; a processor" in page


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--device cuda", "--processor (none) is no page of --device cuda"),
        ("--device cuda --processor zen4", "--processor zen4 is no page of --device cuda"),
        ("--processor h100", "--processor h100 is no page of --device cpu"),
        ("--device cuda --processor h100", "--processor h100, and the GPU here is h200"),
    ],
)
def test_the_page_must_be_one_of_the_device(
    flags: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.bench_peers.gpu_here", lambda: "h200")

    assert main([*flags.split(), "--out", str(tmp_path)]) == 2
    assert f"error: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GH200 480GB", ""),  # another memory
        ("NVIDIA A100-SXM4-80GB", ""),
        (None, ""),
    ],
)
def test_gpus_with_pages_are_known_by_their_names(
    name: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: name is not None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: name)

    assert gpu_here() == found


def test_a_task_on_a_gpu_uses_its_tuning_and_not_that_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Tuning] = []

    def opened(task: Task) -> None:
        used.append(triton_calls.tuning)
        raise MissingPackage("no GPU")

    engines = ("ours-int4-proposed", "ours-int4", "ours-int4-dependent", "hf-bfloat16")
    monkeypatch.setattr(triton_calls, "tuning", triton_calls.MEASURED)  # which it is again afterwards
    for program in ("ours", "hf-dynamic"):
        monkeypatch.setitem(OPENERS, ("decode", program), opened)

    for name in engines:
        answer(replace(TASK, engine=chosen_engines([name], "decode", "cuda")[0]))

    assert used == [TUNINGS[name] for name in ("proposed", "measured", "dependent", "measured")]


@pytest.mark.parametrize("is_there", [True, False])
def test_vllm_has_the_memory_of_a_gpu_alone(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()

    class MadeUpChild:
        def __init__(self, task: Task) -> None:
            self._name = task.engine.program
            seen.append(f"open {self._name}")

        def answer(self, task: Task) -> Reply:
            return Reply()

        def close(self) -> None:
            seen.append(f"close {self._name}")

    monkeypatch.setattr(processes, "Child", MadeUpChild)
    monkeypatch.setattr(processes, "find_spec", lambda name: is_there or None)
    children = processes.Children()
    for name in ("hf-bfloat16", "vllm-bfloat16", "hf-bfloat16"):
        children(replace(TASK, engine=chosen_engines([name], "decode", "cuda")[0]))

    others = (
        ["close hf-dynamic", "open vllm", "close vllm", "open hf-dynamic"] if is_there else ["open vllm", "close vllm"]
    )
    assert seen == ["open hf-dynamic", *others]


def test_a_child_that_takes_too_long_is_ended() -> None:
    assert run_child(replace(TASK, timeout_s=0.05)) == Reply(problem="failed", reason="took longer than 0 s")


RUNS = {"2026-11-27T10": {"commit": "abc"}, "2026-11-28T10": {}}


def of_7b(engine: str, rate: float, batch: int = 1, **changes: Any) -> Row:
    return row(engine, (rate,), **{"batch": batch, "size": "7B", "run": "2026-11-27T10", **changes})


def told(goal: Goal, *rows: Row) -> list[str]:
    name, batches, *values = reached(goal, Results(runs=RUNS, rows=rows, processor="h100")).values()
    assert (name, batches) == (goal.name, " / ".join(map(str, goal.batches)))
    return values


RATIO = Goal("int4", 2, "x", "decode", "7B", (1, 5), ("ours-int4", "ours-int4-proposed"), ("one", "two"))
THEIRS = (of_7b("one", 9.0), of_7b("two", 10.0), of_7b("one", 30.0, 5))
OURS, PROPOSED = (partial(of_7b, name) for name in RATIO.engines)
FIRST = "2026-11-27, abc"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ["- / -", "open", "-", "-"]),
        ([OURS(25.0)], ["2.50x / -", "open", "ours-int4", FIRST]),
        ([OURS(19.97)], ["1.99x / -", "**missed**", "ours-int4", FIRST]),
        (
            [OURS(25.0), OURS(60.0, 5, run="2026-11-28T10")],
            ["2.50x / 2.00x", "met", "ours-int4", f"{FIRST}; 2026-11-28, unknown"],
        ),
        ([OURS(25.0), OURS(59.0, 5)], ["2.50x / 1.97x", "**missed**", "ours-int4", FIRST]),  # at one batch size
        (  # the best is the one whose worst figure is best, among those with most figures
            [OURS(40.0), OURS(50.0, 5), PROPOSED(21.0), PROPOSED(63.0, 5)],
            ["2.10x / 2.10x", "met", "ours-int4-proposed", FIRST],
        ),
        ([OURS(15.0), OURS(45.0, 5), PROPOSED(90.0)], ["1.50x / 1.50x", "**missed**", "ours-int4", FIRST]),
    ],
)
def test_a_ratio_is_that_to_the_best_of_others_at_each_batch_size(rows: list[Row], expected: list[str]) -> None:
    assert told(RATIO, *rows, *THEIRS) == ["2.00x", *expected]


def test_the_newest_figure_counts_with_any_number_of_threads() -> None:
    goal = Goal("captions", 250, "pictures/s", "job", "7B+ViT-L/14", (2000,), ("ours",))
    older = of_7b("ours", 300.0, 2000, part="job", size="7B+ViT-L/14")
    newer = replace(older, rates=(200.4,), threads=8, run="2026-11-28T10")

    expected = ["250 pictures/s", "200", "**missed**", "ours", "2026-11-28, unknown"]
    assert told(goal, older, newer) == told(goal, newer, older) == expected


def test_a_ratio_may_be_to_another_batch_size() -> None:
    goal = Goal("over the loop", 10, "x", "job", "7B", (2000,), ("ours",), ("reference",), 64)
    rows = of_7b("ours", 300.0, 2000, part="job"), of_7b("reference", 30.0, 64, part="job")

    assert told(goal, *rows)[:3] == ["10.00x", "10.00x", "met"]


def test_shares_are_of_the_ceilings_of_the_run() -> None:
    ceilings = (of_7b("read", 3e12, part="ceiling"), of_7b("matmul-bfloat16", 8e14, part="ceiling"))
    steps = Goal("steps", 0.5, "of bandwidth", "decode", "7B", (1,), ("ours-bfloat16",))
    products = Goal("products", 0.5, "of matmul", "prefill", "7B", (64,), ("ours-bfloat16",))
    rows = of_7b("ours-bfloat16", 150.0), of_7b("ours-bfloat16", 40000.0, 64, part="prefill")

    # A step reads 13.2 GB. A token of a prompt needs 12.6 GFLOP: most of the last layer is for the last token alone.
    assert told(steps, *rows, *ceilings)[:3] == ["50% of bandwidth", "66%", "met"]
    assert told(products, *rows, *ceilings)[:3] == ["50% of matmul", "63%", "met"]
    assert told(steps, *rows)[1:3] == ["-", "open"]


def test_the_round_measures_all_figures_of_every_goal(tmp_path: Path) -> None:
    measured = set[tuple[str, str, Rung]]()
    for step in gpu_round.steps("h100", toy=False, out=tmp_path):
        if step.command[1] == "scripts.bench_peers":
            plan, _ = parse(step.command[2:])
            measured |= {(task.engine.name, task.size, rung) for task in plan.tasks() for rung in task.rungs}

    for goal in GOALS:
        wanted = {(engine, goal.size, (goal.part, batch)) for engine in goal.engines for batch in goal.batches}
        over = [goal.over_batch or batch for batch in goal.batches]
        wanted |= {(engine, goal.size, (goal.part, batch)) for engine in goal.over for batch in over}
        assert wanted - measured == set(), goal.name


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if f"gpu-round-{gpu}" in PAGES])
def test_goals_on_a_page_are_those_of_its_figures(gpu: str) -> None:
    name = f"gpu-round-{gpu}"
    figures = load(gpu_round.DOCS, Results(processor=gpu))

    assert read(name)["goals"] == [reached(goal, figures) for goal in GOALS]
