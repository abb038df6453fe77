"""Builds a wheel with compiled kernels, so that its users need no C compiler.

python -m scripts.build_wheel                      dist/llama_adapter-...-manylinux_2_17_x86_64.whl
python -m scripts.build_wheel --machine aarch64    for ARM processors

It needs the packages hatchling and ziglang, and no torch. ziglang's Clang links with the C library of an old system on
any machine.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from llama_adapter.runtime.kernels.compiling import FLAGS, ZIGLANG, compile_kernels
from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS
from llama_adapter.runtime.kernels.prebuilt import name_prebuilt
from scripts.wheel_hook import ENABLED, FOLDER, TAG

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (2, 17)  # released in 2012 (CentOS 7); torch's wheels need a newer one
MACHINES = sorted({instructions.machine for instructions in INSTRUCTION_SETS})


def target_options(machine: str) -> list[str]:
    """Options for ziglang's compiler to build libraries for `machine`, whatever machine runs it."""
    return ["-target", f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}", "-s"]


def build_kernels(machine: str, folder: Path) -> None:
    """Compile the kernels for all instruction sets of `machine` into a folder, under the file names that are looked up.

    Raises OSError or SubprocessError if ziglang is missing or fails.
    """
    for instructions in INSTRUCTION_SETS:
        if instructions.machine != machine:
            continue
        for extras in instructions.variants():
            print(f"compiling {instructions.variant(extras)}", file=sys.stderr)
            made = folder / "kernels.so"
            compile_kernels([*ZIGLANG, *target_options(machine), *FLAGS, *instructions.options(extras)], made)
            name_prebuilt(made, instructions, extras)


def build_wheel(machine: str, out: Path) -> None:
    """Write the wheel for a machine into the folder `out`; raises OSError or SubprocessError."""
    with tempfile.TemporaryDirectory() as folder:
        build_kernels(machine, Path(folder))
        tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out.resolve())]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **ENABLED, TAG: tag, FOLDER: folder}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, default=platform.machine())
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder")
    options = parser.parse_args()
    try:
        build_wheel(options.machine, options.out)
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}\n{error.stderr or ''}\nhint: pip install ziglang hatchling")


if __name__ == "__main__":
    main()
