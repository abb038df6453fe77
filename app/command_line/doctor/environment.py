"""Checks the software that this project uses, part by part, and which uses need each part.

Parts are imported in child processes with a time limit, because a broken driver, toolkit or extension can end its
process, and torch cannot be imported again after a failed import. `probes.py` examines each part, and `command.py`
prints the results.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.command_line.doctor import probes
from llama_adapter.runtime.child_process import State, absent, ask_child
from llama_adapter.runtime.extras import INSTALL_PROJECT, install_hint
from llama_adapter.runtime.graphs.packages import EXPORT_PACKAGES, INSTALL_HINT
from llama_adapter.runtime.host_cpus import usable_cpus
from llama_adapter.runtime.torch_import import AUTOLOAD, NO_TELEMETRY

PROJECT_PACKAGES = ("numpy", "pillow", "pyyaml", "safetensors", "sentencepiece")
SERVER_PACKAGES = ("fastapi", "fastapi-offline", "httpcore", "prometheus-client", "python-multipart", "uvicorn")
PAGE_PACKAGES = ("gradio",)
# Large limits, because the first import of torch from a network disk takes long.
TORCH_S, OTHERS_S = 180.0, 60.0

WITH_TORCH = "commands without --decoder"  # an exported decoder with its encoder runs without torch
# The parts that a use needs, by the flag or command of the use; "always" is for every command.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "always": ("python", *PROJECT_PACKAGES),
    WITH_TORCH: ("torch",),
    "--device cuda": ("CUDA devices",),
    "--device npu": ("torch_npu", "CANN", "NPU devices"),
    "--vision onnx": ("onnxruntime",),
    "--vision om": ("CANN", "NPU devices", "aclruntime", "ais_bench"),
    "serve": SERVER_PACKAGES,
    "web": (*SERVER_PACKAGES, *PAGE_PACKAGES),
    "export onnx": EXPORT_PACKAGES,
    "export om": ("CANN", "atc"),
}
# Parts that only Ascend devices need. Absent ones that no use needs are shown as one line.
ASCEND = ("NPU devices", "CANN", "atc", "torch_npu", "NPU operators", "aclruntime", "ais_bench")
ASCEND_USES = frozenset({"--device npu", "--vision om"})
# Hints for a part that is absent or broken; a hint of the check itself takes precedence.
ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("torch", *PROJECT_PACKAGES), f"install this project's packages: {INSTALL_PROJECT}"),
    "torch_npu": f"after torch's CPU build (docs/ascend.md), {install_hint('npu')}",
    "CANN": "install it, then source its `set_env.sh`: docs/ascend.md",
    "CUDA devices": "`nvidia-smi` must list them, and torch be built with CUDA",
    "NPU devices": "install the driver; its `npu-smi info` must list them: docs/ascend.md",
    "CPU kernels": "plain torch computes, more slowly",
    "atc": "comes with CANN: source its `set_env.sh`",
    **dict.fromkeys(("aclruntime", "ais_bench"), "install it from source: docs/ascend.md"),
    **dict.fromkeys(EXPORT_PACKAGES, INSTALL_HINT),
    **dict.fromkeys(SERVER_PACKAGES, install_hint("serve")),
    **dict.fromkeys(PAGE_PACKAGES, install_hint("web")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One part: whether it is installed and usable, what was found, and a hint on how to fix it.

    `absent` means not installed; `broken` means installed but unusable.
    """

    name: str
    state: State
    found: str = ""
    hint: str = ""


def uses_of(*, device: str = "cpu", vision: str = "torch", has_decoder: bool = False) -> frozenset[str]:
    """The keys of NEEDED for a command with these flags. For an exported decoder, opening it checks its needs."""
    kind = device.partition(":")[0]
    if has_decoder:
        return frozenset({"always"} | ({WITH_TORCH} if vision == "torch" else set()))
    return frozenset({"always", WITH_TORCH, f"--device {kind}", f"--vision {vision}"} & NEEDED.keys())


def is_needed(name: str, *, uses: frozenset[str]) -> bool:
    """Whether one of these uses needs the part with this name."""
    return any(name in NEEDED[use] for use in uses)


def purposes(name: str) -> tuple[str, ...]:
    """The uses that need the part with this name."""
    return tuple(use for use, names in NEEDED.items() if name in names)


def look_at_environment() -> list[Probe]:
    """Examine all parts, in the order in which they are installed.

    This takes seconds, with several child processes at once. Faults of the environment are returned, never raised.
    """
    quiet = {**os.environ, NO_TELEMETRY: "1"}
    extensions = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    deferred, plain = quiet | {AUTOLOAD: "0"}, quiet | {AUTOLOAD: "1"}
    with ThreadPoolExecutor(max_workers=min(4, usable_cpus())) as pool:

        def ask(name: str, *arguments: str, environ: Mapping[str, str] = deferred, seconds: float = OTHERS_S) -> Any:
            question = f"{probes.__name__}:look_at_{name}"
            return pool.submit(ask_child, question, *arguments, environ=environ, seconds=seconds)

        # The slowest checks start first, so that no core is idle at the end.
        groups = (*PROJECT_PACKAGES, *SERVER_PACKAGES, *PAGE_PACKAGES), EXPORT_PACKAGES
        grouped = [ask("packages", *names) for names in groups]
        torch_npu, torch, kernels = (ask(name, seconds=TORCH_S) for name in ("torch_npu", "torch", "kernels"))
        autoload = ask("autoload", environ=plain, seconds=TORCH_S) if extensions else None
        encoder = {name: ask(name) for name in ("aclruntime", "ais_bench")}
        devices, atc = pool.submit(probes.list_devices), pool.submit(probes.look_at_atc)
        answers = {name: said for group in grouped for name, said in group.result().get("packages", {}).items()}
        # A package that fails together with others, or ends their process, is examined in a separate process.
        alone = {name: ask("package", name) for names in groups for name in names if name not in answers}
    packages = answers | {name: said.result() for name, said in alone.items()}
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    return [
        Probe(name="python", state="ok", found=python),
        Probe(name="llama-adapter", state="ok", found=probes.this_project()),
        *(_probe(name, packages[name]) for name in PROJECT_PACKAGES),
        _accelerators(devices.result(), torch_npu.result()),
        _probe("CANN", probes.look_at_cann(os.environ, works=torch_npu.result()["state"] == "ok")),
        _probe("atc", atc.result()),
        _probe("torch", torch.result()),
        *([] if autoload is None else [_autoload(extensions, autoload.result())]),
        _probe("CPU kernels", kernels.result()),
        _probe("CUDA devices", torch.result().get("gpus", absent())),
        _probe("torch_npu", torch_npu.result()),
        *_operators(torch_npu.result()),
        *(_probe(name, said.result()) for name, said in encoder.items()),
        *(_probe(name, packages[name]) for name in (*EXPORT_PACKAGES, *SERVER_PACKAGES, *PAGE_PACKAGES)),
    ]


def fold(probes: list[Probe], *, uses: frozenset[str]) -> list[Probe]:
    """Replace absent Ascend parts by one last line, if no use needs Ascend."""
    gone = [probe.name for probe in probes if probe.name in ASCEND and probe.state == "absent"]
    if not gone or uses & ASCEND_USES:
        return probes
    kept = [probe for probe in probes if probe.name not in gone]
    names = "nothing" if not any(probe.name in ASCEND for probe in kept) else f"no {', no '.join(gone)}"
    return [*kept, Probe(name="Ascend", state="absent", found=f"{names} installed (docs/ascend.md)")]


# Functions that turn answers of child processes into rows of the table.


def _probe(name: str, said: Mapping[str, Any]) -> Probe:
    hint = said["hint"] or ("" if said["state"] == "ok" else ADVICE[name])
    return Probe(name=name, state=said["state"], found=said["found"], hint=hint)


def _autoload(extensions: list[str], said: Mapping[str, Any]) -> Probe:
    names = ", ".join(extensions)
    if said["state"] == "ok":
        return Probe(name="extensions", state="ok", found=f"`import torch` also imports {names}")
    hint = f"this project's commands load {names} only when asked; in other programs set {AUTOLOAD}=0, or uninstall it"
    return Probe(name="extensions", state="broken", found=said["found"], hint=hint)


def _accelerators(driver: Mapping[str, Any], torch_npu: Mapping[str, Any]) -> Probe:
    name, usable = "NPU devices", torch_npu.get("devices", [])
    listed = ", ".join(filter(None, [probes.grouped(usable or driver["names"]), driver["found"]]))
    if usable:
        return Probe(name=name, state="ok", found=listed)
    if driver["locked"]:
        hint = "add this user to the group of these files (usually HwHiAiUser), then log in again"
        return Probe(name=name, state="broken", found=f"no permission for {driver['locked'][0]}", hint=hint)
    if driver["state"] == "ok" and "no_device" in torch_npu:
        found = f"{listed}, but {torch_npu['no_device']}"
        return Probe(name=name, state="broken", found=found, hint=torch_npu["no_device_hint"])
    hint = "" if driver["state"] == "ok" else torch_npu.get("no_device_hint", ADVICE[name])
    return Probe(name=name, state=driver["state"], found=listed or driver["found"], hint=hint)


def _operators(torch_npu: Mapping[str, Any]) -> list[Probe]:
    """A row on the operators that the decoder would use; none without a device."""
    found = torch_npu.get("operators")
    return [Probe(name="NPU operators", state="ok", found=found)] if found else []
