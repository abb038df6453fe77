"""The tests of the kernels on emulated ARM processors: `python -m tests.arm [run ...]`."""

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

KERNELS = ("tests/arm", "tests/runtime/kernels/test_linear.py")
# Without tests that wait for threads: minutes when emulated, and no question of instructions.
EMULATED = "not threads_release_their_memory and not two_callers_at_once"
GCC = "aarch64-linux-gnu-gcc"
# The Clang that compiles wheels. Not by its Python module: variables of the emulated Python would reach this machine's.
CLANG = shlex.join([str(resources.files("ziglang") / "zig"), "cc", *target_options("aarch64")])


class Run(NamedTuple):
    """Tests on a processor of QEMU. torch needs ARMv8.1."""

    processor: str
    features: tuple[str, ...]  # that Linux lists there
    compiler: str = GCC
    tests: tuple[str, ...] = KERNELS


RUNS = {
    "plain": Run("a64fx", ("fp", "asimd")),
    "dotprod": Run(
        "neoverse-n1",
        ("fp", "asimd", "asimddp"),
        tests=(*KERNELS, "tests/llm/test_native_runner.py", "tests/vision/test_native_encoder.py"),
    ),
    "bf16": Run("max,sve=off", ("fp", "asimd", "asimddp", "bf16")),
    "clang": Run("max,sve=off", ("fp", "asimd", "asimddp", "bf16"), compiler=CLANG),
}


def main(names: list[str]) -> int:
    """Returns an exit code."""
    if platform.machine() == "aarch64":
        print("this machine is an ARM one: its own processor runs these tests")
        return 0
    install()
    failed = 0
    for name in names or RUNS:
        run = RUNS[name]
        describe_processor(run.features)
        started = time.perf_counter()
        command = [str(PYTHON), "-m", "pytest", "-m", "not slow", "-k", EMULATED, "-p", "no:cacheprovider", *run.tests]
        variables = {"QEMU_CPU": run.processor, "CC": run.compiler, "XDG_CACHE_HOME": str(FOLDER / "cache")}
        failed += subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode != 0
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
