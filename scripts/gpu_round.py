"""Spends minutes of a GPU on steps in order of worth, and writes its pages docs/peers-GPU.* and docs/gpu-round-GPU.*.

GPU is h100 or h200, NVIDIA's names in small letters; a rehearsal writes pages of h100.

Usage:
    python -m scripts.gpu_round MINUTES                         the steps that are left of this round
    python -m scripts.gpu_round MINUTES --before COMMIT DIR     decoders of a checkout of that commit too, in this call
    python -m scripts.gpu_round MINUTES --rehearse              all of it on the CPU, at toy size; needs `--out`
    python -m scripts.gpu_round --pack                          wheels for a machine without a package index: .wheels

The first step compares what the GPU computes with the CPU; the others measure. Each result is written at once. A step
that fails or that the end of the time cuts does not keep the others from running, and a later call runs it again: the
tests first, then the steps that never ended, then those that failed. When all have passed, a new round begins.

The machine needs Python, torch and pytest. Packages in .wheels are put before its own, so `--pack` on a machine with an
index, and a copy of that folder, give it the rest. `--pack` empties the folder first; a wheel of llama-cpp-python for
CUDA may be added by hand afterwards.

A round goes on from the pages in its folder. On a machine that is lent for minutes, that is the folder that comes back:
RESULTS, whose pages are copied to docs before the next call. An earlier commit travels as a patch:

    git diff -R --binary COMMIT -- . ':!docs' > before.patch        here
    cp docs/*-h200.* RESULTS                                        there, where git must be installed
    cp -r . /tmp/before && (cd /tmp/before && git apply before.patch) &&
    python -m scripts.gpu_round 8.5 --out RESULTS --before COMMIT /tmp/before
"""

import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from llama_adapter.app.jobs.report import circumstances, load_average
from scripts.bench_peers import load
from scripts.common import DOCS, ROOT, add_out, parser_of, positive, tell
from scripts.pages.render import read, save
from scripts.peers.goals import GOALS, LARGE_JOB, reached
from scripts.peers.gpus import GPUS, gpu_here
from scripts.peers.results import Results
from scripts.peers.table import LARGE_JOBS, tuned

PAGE = "gpu-round"  # and the GPU's name
WHEELS = ROOT / ".wheels"
SITE = WHEELS / "site"
TOOLS = ("pytest>=8.4", "pytest-xdist>=3.8", "hypothesis>=6.130", "jsonschema>=4.23", "httpx>=0.27")
# Large and on machines with a GPU, or of versions that the transformers there must accept.
THERE = ("torch", "numpy", "pillow", "sentencepiece", "safetensors", "huggingface_hub", "tokenizers")
# For a rehearsal, in place of sizes and numbers of the round.
SMALL = {"7B": "tiny", "1B": "tiny", "ViT-L/14": "vit-tiny", f"{LARGE_JOB}": "66", "64": "4", "16": "3", "5": "2"}
TOY_CASES = ("BIAS-TINY", "bias_b1", "bias_b3_equal", "lora_b1")  # of the tests that are rehearsed
TESTS = "tests"  # the step that compares; it comes before those that measure
BEFORE = "before"  # and the commit
TAKES_S: Mapping[str, float] = {  # estimated, on an H100 with 16 cores; 33 minutes in all
    TESTS: 120.0,
    BEFORE: 80.0,
    "large jobs": 240.0,
    "trace": 60.0,
    "kernels": 240.0,
    "encoder": 180.0,
    "kernels 1B": 180.0,
    "decoder 7B": 260.0,
    "decoder 1B": 400.0,
    "jobs": 80.0,
    "long rows": 45.0,
    "context 512": 45.0,
    "context 2048": 45.0,
}
_LINES = 12  # of the output of a step that did not pass
_SHOWN = 40  # of the output of a step that is shown
_PROFILER = re.compile(r"\S.* \S*Profiler\w*\.cpp:\d+\] ")  # torch's lines about itself
_UNMEASURED = re.compile(r"round .* (missing|failed): ")  # an engine
_START_S = 20.0
_GRACE_S = 10.0
_MOST_TIMES = 2.5  # of its estimated time, for a step that does not end itself: a kernel that hangs ends no round

Commit = tuple[str, str]  # its name, and the folder of its checkout
State = Literal["passed", "failed", "cut"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command of the round. It is not started with less than `least_s` seconds left."""

    name: str
    about: str
    command: tuple[str, ...]  # arguments of Python
    least_s: float  # for tests and traces their whole time; what is measured until the end of the time counts
    is_shown: bool = False  # whether the page has its output
    most_s: float = math.inf  # after which it is cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the last run of a step ended."""

    about: str
    state: State
    seconds: float
    time: str
    commit: str
    gpu: str
    lines: tuple[str, ...] = ()  # the last lines of a step that did not pass or is shown; else engines that are missing


def steps(gpu: str, *, toy: bool, out: Path, before: Commit | None = None) -> tuple[Step, ...]:
    """All steps for a GPU, those of most worth first. Toy steps are the same commands with tiny models, on the CPU.

    The decoders of `before` are measured too.
    """

    def measured(name: str, about: str, *flags: str) -> Step:
        command = ["-m", "scripts.bench_peers", "--device", "cuda", "--processor", gpu, "--out", str(out), *flags]
        command += ["--threads", "1" if toy else "8"]
        if toy:
            command = [SMALL.get(word, word) for word in command] + ["--on", "cpu", "--budget", "0.1", "--rounds", "1"]
            if "--engines" not in flags:  # compiling takes a processor long
                command += ["--engines", "ours-bfloat16", "hf-bfloat16", "reference-bfloat16"]
        return Step(
            name=name, about=about, command=tuple(command), least_s=16.0 if toy else _START_S + TAKES_S[name] / 4
        )

    def traced(name: str, about: str, *flags: str) -> Step:
        command = ("-m", "scripts.gpu_trace", *flags, *(toy_trace if toy else ()))
        least_s = 16.0 if toy else TAKES_S[name]
        most_s = _MOST_TIMES * TAKES_S[name]
        return Step(name=name, about=about, command=command, least_s=least_s, is_shown=True, most_s=most_s)

    few = 2 if toy else None
    batches = ("1", "5", "16", "64")[:few]
    pictures = ("16", "1", "64", "5", "256")[:few]  # every other one is compiled first
    decoders = ("--sections", "decode", "--batch-sizes", *batches, "--prefill-batch-sizes", *batches)
    ours = ("ours-bfloat16", "ours-int8", "ours-int4")
    kernels = [kernel for name in ours for kernel in tuned(name)]
    kernels = [kernels[0], kernels[-1]] if toy else kernels
    captions = ("--sizes", "7B", "--sections", "job", "--job-sizes")
    slots = tuple(LARGE_JOBS)[:: 2 if toy else 1]
    toy_trace = ("--decoder", "tiny", "--encoder", "vit-tiny", "--slots", "1", "--on", "cpu")
    xdist = ("-n", "0" if toy else "12", "--dist", "worksteal", "-o", "faulthandler_timeout=120")  # names what hangs
    two_changes = "; products change too, so compare the lines of attention, not totals"
    tests = (
        ("tests/cuda/test_parity.py", "-k", f"({' or '.join(TOY_CASES)}) and not input and not eos and not float16")
        if toy
        else ("tests/cuda", "tests/runtime/devices/test_triton.py")
    )
    earlier = []
    if before is not None:
        about = "steps and prefills of 7B by the code of an earlier commit, as engines with `-before`"
        same = measured(BEFORE, about, "--sizes", "7B", *decoders, "--rounds", "1", "--engines", *ours)
        flags = "-m", "scripts.gpu_before", *before, *same.command[2:]
        earlier = [dataclasses.replace(same, name=f"{BEFORE} {before[0]}", command=flags)]
    return (
        Step(
            name=TESTS,
            about="what the GPU computes, compared with the CPU (`make cuda`)",
            command=("-m", "pytest", "-p", "no:benchmark", *xdist, *tests),
            least_s=1.0 if toy else TAKES_S[TESTS],
            most_s=_MOST_TIMES * TAKES_S[TESTS],
        ),
        *earlier,
        measured(
            "large jobs",
            f"{LARGE_JOB:,} pictures, 7B with ViT-L/14, in 64 and 256 slots, in as many as fit, and in fewer bits",
            *(*captions, f"{LARGE_JOB}", "--engines", *slots, "--rounds", "1"),
        ),
        traced("trace", "kernels and gaps of steps, a prefill, the encoder and a job, 7B with ViT-L/14 in 256 slots"),
        measured(
            "kernels",
            "7B by the kernels that are to be tried beside the default: `TUNINGS` in triton_calls.py",
            *("--sizes", "7B", *decoders, "--rounds", "1", "--engines", *kernels),
        ),
        measured(
            "encoder",
            "ViT-L/14 in bfloat16, float16 and float32 beside Hugging Face's, eager and compiled",
            *("--sizes", "ViT-L/14", "--sections", "vision", "--batch-sizes", *pictures, "--rounds", "2"),
        ),
        measured(
            "kernels 1B",
            "the same with 1B",
            *("--sizes", "1B", *decoders, "--rounds", "1", "--engines", *kernels),
        ),
        traced(
            "long rows",
            f"kernels of steps of 7B in 1 and 4 rows of 3,000 places, attention whole and in parts{two_changes}",
            *("--places", "70" if toy else "3000"),
        ),
        *(
            traced(
                f"context {context}",
                f"the same in 1 and 16 rows of 100 places in a cache of {context}, where most parts are empty",
                *("--places", "100", "--context", f"{context}", "--slots", "16"),
            )
            for context in (512, 2048)
        ),
        measured(
            "decoder 7B",
            "steps and prefill beside Hugging Face's, eager and compiled",
            *("--sizes", "7B", *decoders, "--rounds", "2"),
        ),
        measured(
            "decoder 1B",
            "the same with 1B and Llama-3.2-1B, and beside llama.cpp",
            *("--sizes", "1B", *(() if toy else ("Llama-3.2-1B",)), *decoders, "--rounds", "2"),
        ),
        measured(
            "jobs",
            "5 and 64 pictures, 7B with ViT-L/14, beside the reference's loop",
            *(*captions, "5", "64", "--rounds", "2"),
        ),
    )


def left(names: Sequence[str], outcomes: Mapping[str, Outcome]) -> list[str]:
    """The steps to run, in order: the tests, those that never ended, those that failed. All of them if all have passed.

    Tests that failed come before figures: a figure of a wrong result is worth nothing.
    """
    failed = [name for name in names if name in outcomes and outcomes[name].state == "failed"]
    unended = [name for name in names if name not in outcomes or outcomes[name].state == "cut"]
    return sorted([*unended, *failed], key=lambda name: name != TESTS) or list(names)


def run_round(minutes: float, gpu: str, *, toy: bool, out: Path, before: Commit | None = None) -> dict[str, Outcome]:
    """Run steps while there is time; writes the page after each. Returns the outcomes of the steps that were run.

    The page keeps steps of earlier calls that are not among those of this one, as the last ones.
    """
    ends = time.monotonic() + 60 * minutes
    about = circumstances(load_before=load_average())
    page = f"{PAGE}-{gpu}"
    outcomes = _outcomes(page, out)
    found: dict[str, Outcome] = {}
    known = {step.name: step for step in steps(gpu, toy=toy, out=out, before=before)}
    for name in left(list(known), outcomes):
        step, left_s = known[name], ends - time.monotonic()
        if left_s <= step.least_s:
            tell(f"{name}: left out, it needs {step.least_s:.0f} s and {max(left_s, 0.0):.0f} s are left")
            continue
        tell(f"{name}: {step.about}")
        state, seconds, lines = _run(step, left_s, toy=toy)
        tell(f"{name}: {state} after {seconds:.0f} s")
        found[name] = outcomes[name] = Outcome(
            about=step.about,
            state=state,
            seconds=round(seconds, 1),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=about["commit"],
            gpu="the CPU, at toy size" if toy else torch.cuda.get_device_name(0),
            lines=lines,
        )
        names = [*(one for one in known if one in outcomes), *(one for one in outcomes if one not in known)]
        rows = [{"name": one, **dataclasses.asdict(outcomes[one])} for one in names]
        measured = load(out, Results(processor=gpu))
        save(page, {"steps": rows, "goals": [reached(goal, measured) for goal in GOALS]}, out)
    return found


def _outcomes(page: str, out: Path) -> dict[str, Outcome]:
    """What earlier calls wrote into the folder; empty without a file."""
    if not (out / f"{page}.json").is_file():
        return {}
    fields = [field.name for field in dataclasses.fields(Outcome)]
    return {step["name"]: Outcome(**{name: step[name] for name in fields}) for step in read(page, out)["steps"]}


def _run(step: Step, left_s: float, *, toy: bool) -> tuple[State, float, tuple[str, ...]]:
    """Run a step for at most `left_s` seconds, and show its output. Returns its state, seconds, and lines to keep."""
    command, left_s = [sys.executable, *step.command], min(left_s, step.most_s)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    environment.setdefault("TRITON_CACHE_DIR", str(ROOT / ".work/triton"))  # tests compile kernels of later steps too
    if SITE.exists():
        environment["PYTHONPATH"] = str(SITE)
    if toy:
        environment["TEST_DEVICE"] = "cpu"
    if "--device" in command:
        command += ["--limit", f"{left_s:.0f}"]
    started = time.monotonic()
    lines = list[str]()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        # A measurement ends itself at its limit, with what it has; the timer is for the tests.
        timer = threading.Timer(left_s + _GRACE_S, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            tell(f"  {lines[-1]}")
    timer.cancel()
    seconds = time.monotonic() - started
    last = tuple(lines[-_LINES:])
    if seconds > left_s or any("the time is over" in line for line in last):
        return "cut", seconds, last
    if process.returncode:
        return "failed", seconds, last
    if step.is_shown:
        return "passed", seconds, tuple([line for line in lines if not _PROFILER.match(line)][-_SHOWN:])
    return "passed", seconds, tuple(line for line in lines if _UNMEASURED.match(line))


def unpack() -> None:
    """Install all wheels of .wheels, without what they need, into a folder of their own."""
    if wheels := sorted(map(str, WHEELS.glob("*.whl"))):
        flags = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE))
        subprocess.run([sys.executable, "-m", "pip", "install", *flags, *wheels], check=True)


def pack(python: str) -> int:
    """Download what the package, its service and the tests need, except `THERE`, in place of the wheels of before.

    Returns the bytes of all wheels.
    """
    for wheel in WHEELS.glob("*.whl"):
        wheel.unlink()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["serve"], *TOOLS]
    systems = (f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17))
    flags = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    flags += [flag for system in (*systems, "manylinux2014_x86_64") for flag in ("--platform", system)]
    there = re.compile(rf"({'|'.join(THERE)})\b(?!-\D)")
    words = [name for name in wanted if not there.match(name)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *flags, "-d", str(WHEELS), *words], check=True)
    for wheel in WHEELS.glob("*.whl"):
        if there.match(wheel.name):  # something else needs it
            wheel.unlink()
    return sum(path.stat().st_size for path in WHEELS.glob("*.whl"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is 0 if every step that was run has passed, 1 otherwise, 2 for invalid flags or another GPU."""
    parser = parser_of(__doc__)
    parser.add_argument("minutes", type=positive(float), nargs="?", help="for the whole call")
    parser.add_argument("--before", nargs=2, metavar=("COMMIT", "DIR"), help="a checkout that is measured too")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--pack", action="store_true", help="download wheels, and do nothing else")
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU (default: 3.12)")
    add_out(parser, f"{PAGE}-GPU")
    options = parser.parse_args(arguments)
    if options.pack:
        tell(f"{WHEELS.name}: {pack(options.python) / 1e6:.0f} MB")
        return 0
    if options.minutes is None or (options.rehearse and options.out is None):
        parser.error("give the minutes, or --pack; a rehearsal also needs --out")
    before = options.before and (options.before[0], str(Path(options.before[1]).resolve()))
    if before and not Path(before[1], "scripts/bench_peers.py").is_file():
        parser.error(f"--before needs a checkout, and {before[1]} has no scripts/bench_peers.py")
    gpu = GPUS[0] if options.rehearse else gpu_here()
    if not gpu:
        names = " or ".join(map(str.upper, GPUS))
        tell(f"error: pages are of an NVIDIA {names}, and torch {torch.__version__} sees none here; see --rehearse")
        return 2
    out = (options.out or DOCS).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not options.rehearse:
        unpack()
    found = run_round(options.minutes, gpu, toy=options.rehearse, out=out, before=before)
    return 0 if all(outcome.state == "passed" for outcome in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
