"""Runs the numeric tests as other processors compute: `python -m tests.processors [--slow] [PATH ...]`.

Environment variables choose the instructions of our kernels, of torch, and of its libraries oneDNN, MKL and OpenBLAS,
and the number of threads. So bounds that hold on one processor alone are found on another one. onnxruntime chooses by
the processor itself. Without PATH, all folders with numeric tests are run. The exit code is 1 if a test failed. This
needs an x86-64 processor with AVX2, and AVX-512 for all of it.
"""

import argparse
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MISSING = "TEST_MISSING_FLAGS"  # environment variable: flags that this processor shall seem to lack
AVX2 = {"LLAMA_ADAPTER_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PROCESSORS: dict[str, dict[str, str]] = {
    "this one": {},
    "AVX2, as Zen 3": AVX2,
    "AVX2, as Haswell, two threads": {
        **AVX2,
        "MKL_CBWR": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads without a core must not spin
    },
    "AVX-512 without AMX": {MISSING: "amx_int8", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "AVX-512 without bfloat16": {MISSING: "avx512_bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "no kernels, SSE, four threads": {
        MISSING: "avx512f avx2",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "OPENBLAS_CORETYPE": "Prescott",
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "PASSIVE",
    },
}
RUNTIME = tuple(f"tests/runtime/{name}" for name in ("devices", "graphs", "kernels", "schemes"))
APP = tuple(f"tests/app/{name}" for name in ("captioning", "compat", "learning", "models"))
FOLDERS = ("tests/test_bounds.py", "tests/parity", "tests/llm", "tests/vision", *RUNTIME, *APP)


def pytest_configure() -> None:
    """Hide flags of the processor. This module is loaded as a plugin."""
    if missing := os.environ.get(MISSING):
        from llama_adapter.runtime.kernels import instruction_sets

        read = instruction_sets.processor_flags
        left = read() - set(missing.split())
        instruction_sets.processor_flags = functools.wraps(read.__wrapped__)(lambda: left)  # type: ignore[assignment]


def main(arguments: list[str]) -> int:
    """Returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.processors")
    parser.add_argument("paths", nargs="*", default=FOLDERS, metavar="PATH")
    parser.add_argument("--slow", action="store_true", help="slow tests too")
    parser.add_argument("--processes", default="auto", metavar="N")
    options = parser.parse_args(arguments)
    command = [sys.executable, "-m", "pytest", "-p", "tests.processors", "-p", "no:cacheprovider", "-n"]
    command += [options.processes, "--dist", "loadfile", *([] if options.slow else ["-m", "not slow"]), *options.paths]
    failed = []
    for name, variables in PROCESSORS.items():
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        lines = re.findall(r"^(?:FAILED|ERROR) .*|^.*(?:passed|failed|error).* in .*$", ran.stdout, re.MULTILINE)
        print(f"{name}: {lines[-1] if lines else ran.stdout[-2000:] + ran.stderr[-2000:]}")
        print(*(f"  {line}" for line in lines[:-1]), sep="\n", end="\n" if lines[:-1] else "", flush=True)
        if ran.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
