"""Runs the kernels' tests on emulated ARM processors: `python -m tests.arm [short | run ...]`; by default all runs.

`short` does two runs with few tests, for `make test`.
"""

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import resources
from typing import NamedTuple

from scripts.build_wheel import target_options
from tests.arm.environment import FOLDER, PYTHON, ROOT, describe_processor, install

CAPTIONS, LINEAR = "tests/arm/test_captions.py", "tests/runtime/kernels/test_linear.py"
ROUNDING = "tests/runtime/schemes/test_int4_rounding.py"
DECODER, RANKS = "tests/llm/test_native_runner.py", "tests/llm/test_native_ranks.py"
ENCODER = "tests/vision/test_native_encoder.py"
QUERY = f"{ENCODER}::test_the_visual_query_is_that_of_torchs_modules"
KERNELS = (CAPTIONS, LINEAR, ROUNDING)
# A few tests for each module of the kernels.
QUICK_KERNELS = (
    f"{CAPTIONS}::test_the_kernels_are_in_use_with_the_processors_extras",
    f"{CAPTIONS}::test_linux_lists_the_features_that_the_processor_has",
    *(f"{CAPTIONS}::test_the_known_answer_is_given_in_each_number_format[{kind}]" for kind in ("bfloat16", "int8")),
    LINEAR,
    *(
        f"{DECODER}::test_prefill_steps_and_scores_are_the_plain_decoders[torch.float32-{config}]"
        for config in ("heads of 64", "gemma")
    ),
    f"{DECODER}::test_prefill_equals_single_steps_bitwise",
    f"{DECODER}::test_weights_of_few_bits_run_in_kernels_or_are_dequantised",
    f"{RANKS}::test_all_ranks_have_the_whole_decoders_logits[heads of 128-torch.float32-int8-2]",
    *(f"{QUERY}[{case}]" for case in ("torch.float32-heads of 80", "torch.bfloat16-heads of 32 and 48")),
    f"{ENCODER}::test_a_picture_has_the_same_bits_alone_among_others_and_with_any_number_of_threads",
)
# Without tests for x86 and tests that wait for threads: these take minutes when emulated, and do not depend on
# instructions.
EMULATED = "not avx and not threads_release_their_memory and not two_callers_at_once"
QUICK = f"{EMULATED} and not captions_are_torchs and not long_rows and not 9000"  # captions by torch take a minute
GCC = "aarch64-linux-gnu-gcc"
# The Clang that compiles wheels. It is not started by its Python module, because variables of the emulated Python would
# then reach this machine's Python.
CLANG = shlex.join([str(resources.files("ziglang") / "zig"), "cc", *target_options("aarch64")])
HINT = """\
hint: a network is needed. Debian's packages for arm64 come by apt-get and dpkg-deb (not as root), wheels for AArch64 by
pip; both take the mirrors of this machine. All other tests of `make test` run without these, as does
`make check`."""


NEWEST, ALL = "max,sve=off", ("asimddp", "i8mm", "bf16")


class Run(NamedTuple):
    """Tests on one of QEMU's processors. torch needs ARMv8.1."""

    processor: str
    extras: tuple[str, ...]  # the optional features of the processor that the kernels use
    compiler: str = GCC
    tests: tuple[str, ...] = KERNELS
    selected: str = EMULATED  # the tests to run, an expression for pytest's -k
    limit_s: float = 5400.0


RUNS = {
    "plain": Run("a64fx", ()),
    "dotprod": Run("neoverse-n1", ("asimddp",), tests=(*KERNELS, DECODER, RANKS, ENCODER)),
    "newest": Run(NEWEST, ALL, tests=(*KERNELS, DECODER, RANKS, ENCODER)),
    "clang": Run(NEWEST, ALL, compiler=CLANG),
}
SHORT = {
    "plain, in short": Run("a64fx", (), tests=KERNELS, selected=QUICK, limit_s=1200.0),
    "newest, in short": Run(NEWEST, ALL, tests=QUICK_KERNELS, selected=QUICK, limit_s=1800.0),
}


def main(names: list[str]) -> int:
    """Returns an exit code."""
    if platform.machine() == "aarch64":
        print("this machine is an ARM one: its own processor runs these tests")
        return 0
    started = time.perf_counter()
    try:
        install()
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: Python and torch for ARM processors could not be installed: {error}\n{HINT}", file=sys.stderr)
        return 1
    print(f"Python and torch for ARM processors: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    runs = SHORT if names == ["short"] else {name: RUNS[name] for name in names or RUNS}
    failed = [name for name, run in runs.items() if not passes(name, run)]
    return 1 if failed else 0


def passes(name: str, run: Run) -> bool:
    describe_processor(("fp", "asimd", *run.extras))
    started = time.perf_counter()
    command = [str(PYTHON), "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", "--durations", "10"]
    command += ["-k", run.selected, *run.tests]
    variables = {"QEMU_CPU": run.processor, "CC": run.compiler, "XDG_CACHE_HOME": str(FOLDER / "cache")}
    variables["EXTRAS"] = " ".join(run.extras)
    try:
        ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, timeout=run.limit_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"error: the tests on {run.processor} were stopped after {run.limit_s:.0f} s", file=sys.stderr)
        return False
    print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return ran.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
