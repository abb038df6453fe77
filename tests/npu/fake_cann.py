"""Builds the CANN libraries that torch_npu and onnxruntime-cann link against, from the libraries' undefined names.

Our C code implements memory, copies, streams, devices and collectives. Every other function becomes a stub that returns
0. No kernel computes. Nothing from Huawei is used except the tested wheel.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("fake_*.c"))
MAIN = "libascendcl.so"
# Needed by torch_npu 2.13 (readelf -d). These libraries are empty and link to the main one, in which dlsym finds every
# name.
OTHERS = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libfmk_parser.so",  # torchair needs this and the next one
    "libascend_protobuf.so",
    "libfmk_onnx_parser.so",  # onnxruntime-cann needs this one
)
# The kernels (aclnn...) are left out, because torch_npu looks them up only when it computes.
OURS = re.compile(r"(?:acl(?!nn)|Hccl|hccl|Msprof|rt[A-Z]|_ZNK?2ge|_ZNK?4gert)\w+|[a-z]+_s")
DEFINED = re.compile(r"^(?:int|size_t|const char \*)\s*(\w+)\(", re.MULTILINE)
FLAGS = ("-shared", "-fPIC", "-O1", "-w", "-pthread")


def build(libraries: list[Path], *, cache: Path) -> Path:
    """The folder with the CANN libraries needed by these libraries of a wheel. It is rebuilt if an input changes.

    Raises RuntimeError if gcc or nm is missing or fails.
    """
    key = hashlib.sha256(Path(__file__).read_bytes())
    for source in (*SOURCES, *FOLDER.glob("fake_*.h")):
        key.update(source.read_bytes())
    for library in libraries:
        key.update(f"{library.name} {library.stat().st_size}".encode())
    folder = cache / f"fake-cann-{key.hexdigest()[:16]}"
    if not folder.exists():
        started = cache / f"{folder.name}.{os.getpid()}"
        shutil.rmtree(started, ignore_errors=True)
        started.mkdir(parents=True)
        _compile(started, names=wanted_names(libraries))
        try:
            started.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(started)
    return folder


def wanted_names(libraries: list[Path]) -> set[str]:
    """CANN's C functions that the libraries link against, or that they name to look them up at run time."""
    linked = _output("nm", "-D", "--undefined-only", "--format=just-symbols", *map(str, libraries))
    defined = _output("nm", "-D", "--defined-only", "--format=just-symbols", *map(str, libraries))
    names = {name.partition("@")[0] for name in linked.split()} - set(defined.split())
    for library in libraries:
        names.update(text.decode() for text in re.findall(rb"(?<=\0)(?:acl|Hccl)\w+(?=\0)", library.read_bytes()))
    return {name for name in names if OURS.fullmatch(name)}


def _compile(folder: Path, *, names: set[str]) -> None:
    written = "".join(source.read_text(encoding="ascii") for source in SOURCES)
    stubs = sorted(names - set(DEFINED.findall(written)))
    generated = folder / "stubs.c"
    generated.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in stubs), encoding="ascii")
    _output("gcc", *FLAGS, f"-Wl,-soname,{MAIN}", "-o", str(folder / MAIN), *map(str, SOURCES), str(generated))
    empty = folder / "empty.c"
    empty.write_text("")
    for name in OTHERS:
        link = ("-Wl,--no-as-needed", f"-L{folder}", f"-l:{MAIN}", f"-Wl,-soname,{name}")
        _output("gcc", *FLAGS, "-o", str(folder / name), str(empty), *link)


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-500:]}")
    return done.stdout
