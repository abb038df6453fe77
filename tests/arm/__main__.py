"""The tests of the kernels on emulated ARM processors: `python -m tests.arm [processor ...]`."""

import os
import platform
import subprocess
import sys
import time

from tests.arm.environment import FOLDER, PYTHON, ROOT, describe_processor, install

KERNELS = ("tests/arm", "tests/runtime/kernels/test_linear.py")
# Without tests that wait for threads: minutes when emulated, and no question of instructions.
EMULATED = "not threads_release_their_memory and not two_callers_at_once"
# QEMU's processors, with the features that Linux lists on them and the tests that run there. torch needs ARMv8.1.
PROCESSORS = {
    "a64fx": (("fp", "asimd"), KERNELS),
    "neoverse-n1": (
        ("fp", "asimd", "asimddp"),
        (*KERNELS, "tests/llm/test_native_runner.py", "tests/vision/test_native_encoder.py"),
    ),
    "max,sve=off": (("fp", "asimd", "asimddp", "bf16"), KERNELS),
}


def main(names: list[str]) -> int:
    """Returns an exit code."""
    if platform.machine() == "aarch64":
        print("this machine is an ARM one: its own processor runs these tests")
        return 0
    install()
    failed = 0
    for name in names or PROCESSORS:
        features, tests = PROCESSORS[name]
        describe_processor(features)
        started = time.perf_counter()
        command = [str(PYTHON), "-m", "pytest", "-m", "not slow", "-k", EMULATED, "-p", "no:cacheprovider", *tests]
        variables = {"QEMU_CPU": name, "CC": "aarch64-linux-gnu-gcc", "XDG_CACHE_HOME": str(FOLDER / "cache")}
        failed += subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode != 0
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
