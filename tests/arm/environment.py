"""Python and torch for AArch64 in .venv/arm64, run by QEMU on another machine.

Python and its libraries are Debian's packages for arm64, unpacked into one folder. The machine's own packages are not
changed. Everything else is installed from wheels with pip.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "arm64"
SYSTEM, SITE, PYTHON = FOLDER / "system", FOLDER / "site", FOLDER / "python"
INSTALL_S = 900.0

DEBIAN = ("python3", "libstdc++6", "libgomp1")
TORCH = "torch==2.10.0"  # later wheels for AArch64 need CUDA libraries
PACKAGES = (
    *("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"),  # requirements of torch
    *("numpy", "pillow", "pyyaml", "safetensors", "sentencepiece", "shtab"),
    *("pytest", "pytest-xdist", "hypothesis"),
)
_WHEELS = ("--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64", "--only-binary", ":all:")

# QEMU does not set `sys.executable`, so its option -0 does, and then Python finds its library only with PYTHONHOME.
# Python must write no bytecode, because it could land among this machine's own modules.
_LAUNCHER = """#!/bin/sh
exec env PYTHONHOME=/usr PYTHONPATH='{site}:{root}' PYTHONDONTWRITEBYTECODE=1 \\
  qemu-aarch64 -0 "$0" -L '{system}' '{python}' "$@"
"""


def install() -> None:
    """Create the environment, unless it exists with these packages. Raises RuntimeError."""
    wanted, stamp = "\n".join((*DEBIAN, TORCH, *PACKAGES, _LAUNCHER)), FOLDER / "installed.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    _unpack_system()
    python = next(path for path in sorted((SYSTEM / "usr" / "bin").glob("python3.*")) if path.name[8:].isdigit())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(SITE)]
    pip += [*_WHEELS, "--python-version", python.name.removeprefix("python")]
    _run(*pip, *PACKAGES)
    _run(*pip, "--no-deps", TORCH)  # pip would evaluate its requirements for this machine
    _compile_modules(python.name)
    PYTHON.write_text(_LAUNCHER.format(site=SITE, root=ROOT, system=SYSTEM, python=python), encoding="utf-8")
    PYTHON.chmod(0o755)
    stamp.write_text(wanted, encoding="utf-8")


def describe_processor(features: Sequence[str]) -> None:
    """Let /proc/cpuinfo list these features. Without such a file, QEMU before 8.1 shows the host's features."""
    (SYSTEM / "proc").mkdir(exist_ok=True)
    (SYSTEM / "proc" / "cpuinfo").write_text(f"Features\t: {' '.join(features)}\n", encoding="utf-8")


def _unpack_system() -> None:
    lists, cache = FOLDER / "apt" / "lists", FOLDER / "apt" / "cache"
    for folder in (lists / "partial", cache / "archives" / "partial", SYSTEM):
        folder.mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64"]
    apt += ["-o", f"Dir::State::Lists={lists}", "-o", "Dir::State::status=/dev/null", "-o", f"Dir::Cache={cache}"]
    apt += ["-o", "Debug::NoLocking=1"]
    _run(*apt, "update")
    _run(*apt, "--yes", "--download-only", "--no-install-recommends", "install", *DEBIAN)
    for package in sorted((cache / "archives").glob("*.deb")):
        _run("dpkg-deb", "--extract", str(package), str(SYSTEM))
    shutil.rmtree(FOLDER / "apt")


def _compile_modules(version: str) -> None:
    """Write bytecode with this machine's Python of that version.

    Otherwise an emulated import of torch takes a minute.
    """
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if python := sys.executable if own == version else shutil.which(version):
        # Some files are intentionally written for other versions, so the exit code is ignored.
        subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", str(FOLDER)], timeout=INSTALL_S, check=False)


def _run(*command: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=environment)
    if ran.returncode:
        said = (ran.stderr + ran.stdout).strip().splitlines()[-5:]
        raise RuntimeError("\n".join([f"{shlex.join(command)} failed:", *said]))
