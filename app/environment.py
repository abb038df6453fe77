"""Looks at what is installed around this project, part by part, and says what each gap is in the way of.

Whatever has to be imported or run is so in a child process with a time limit: a broken driver, toolkit or extension can
end its process, and torch cannot be imported a second time where its first import failed. What the parts are needed
for is the table `NEEDED`; printing them is the doctor's (app/checkup.py).
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from app import cann
from app.child import State, absent, ask_child, broken, last_line, ok, one_line, run_program
from app.startup import AUTOLOAD, NO_TELEMETRY
from vision.errors import EncoderError
from vision.export.toolkit import find_atc

PROJECT_PACKAGES = ("numpy", "pillow", "safetensors", "sentencepiece")
EXPORT_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
IMPORT_NAMES = {"pillow": "PIL"}
DEVICE_FILES = (Path("/dev"), "davinci[0-9]*")
# Generous: the first import of torch from a network disk takes long.
TORCH_S, OTHERS_S = 180.0, 60.0

# What a part is needed for, as a user asks for it; "always" is every command.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "always": ("python", "torch", *PROJECT_PACKAGES),
    "--device cuda": ("CUDA devices",),
    "--device npu": ("torch_npu", "CANN", "NPU devices"),
    "--vision onnx": ("onnxruntime",),
    "--vision om": ("CANN", "NPU devices", "aclruntime", "ais_bench"),
    "export onnx": EXPORT_PACKAGES,
    "export om": ("CANN", "atc"),
}
# What to do about a part that is not there, or there and not usable; a check's own words come first.
ADVICE: Mapping[str, str] = {
    **dict.fromkeys(("torch", *PROJECT_PACKAGES), "install this project's packages: `make demo`, or `pip install .`"),
    "torch_npu": "install the extra `npu`: docs/ascend.md",
    "CANN": "install it, then source its `set_env.sh`: docs/ascend.md",
    "NPU devices": "`npu-smi info` of the driver must list them",
    "atc": "comes with CANN: source its `set_env.sh`",
    **dict.fromkeys(("aclruntime", "ais_bench"), "install it from source: docs/ascend.md"),
    **dict.fromkeys(EXPORT_PACKAGES, "install the extra `onnx`: `pip install 'llama-adapter[onnx]'`"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One part: whether it is there and usable, what was found, and what to do about a gap.

    `absent` is not installed; `broken` is installed and unusable as it is.
    """

    name: str
    state: State
    found: str = ""
    hint: str = ""


def uses_of(*, device: str = "cpu", vision: str = "torch") -> frozenset[str]:
    """The keys of NEEDED that a command with these flags asks for."""
    kind = device.partition(":")[0]
    return frozenset({"always", f"--device {kind}", f"--vision {vision}"} & NEEDED.keys())


def is_needed(name: str, *, uses: frozenset[str]) -> bool:
    """Whether the part of this name is needed for one of these uses."""
    return any(name in NEEDED[use] for use in uses)


def purposes(name: str) -> tuple[str, ...]:
    """What the part of this name is needed for."""
    return tuple(use for use, names in NEEDED.items() if name in names)


def look_at_environment() -> list[Probe]:
    """All parts in the order of a report. Takes some seconds, several child processes at once.

    Never raises for what is wrong with the environment.
    """
    quiet = {**os.environ, NO_TELEMETRY: "1"}
    extensions = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    deferred, plain = quiet | {AUTOLOAD: "0"}, quiet | {AUTOLOAD: "1"}
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:

        def ask(name: str, *arguments: str, environ: Mapping[str, str] = deferred, seconds: float = OTHERS_S) -> Any:
            question = f"{__name__}:look_at_{name}"
            return pool.submit(ask_child, question, *arguments, environ=environ, seconds=seconds)

        torch, torch_npu = ask("torch", seconds=TORCH_S), ask("torch_npu", seconds=TORCH_S)
        autoload = ask("autoload", environ=plain, seconds=TORCH_S) if extensions else None
        packages = {name: ask("package", name) for name in (*PROJECT_PACKAGES, *EXPORT_PACKAGES)}
        encoder = {name: ask(name) for name in ("aclruntime", "ais_bench")}
        devices, atc = pool.submit(_list_devices), pool.submit(_look_at_atc)
    return [
        _python(),
        _probe("torch", torch.result()),
        *([] if autoload is None else [_autoload(extensions, autoload.result())]),
        *(_probe(name, packages[name].result()) for name in PROJECT_PACKAGES),
        _gpus(torch.result()),
        _probe("torch_npu", torch_npu.result()),
        _toolkit(works=torch_npu.result()["state"] == "ok"),
        _accelerators(devices.result(), torch_npu.result()),
        _probe("atc", atc.result()),
        *(_probe(name, said.result()) for name, said in encoder.items()),
        *(_probe(name, packages[name].result()) for name in EXPORT_PACKAGES),
    ]


# What is asked in a child process.


def look_at_torch() -> dict[str, Any]:
    """torch without its extensions; facts: `gpus`, their names, and `has_gpu_build`."""
    if importlib.util.find_spec("torch") is None:
        return absent()
    import torch

    count, threads = torch.cuda.device_count(), torch.get_num_threads()
    return ok(
        f"{torch.__version__}, {threads} thread{'' if threads == 1 else 's'}",
        gpus=[torch.cuda.get_device_name(index) for index in range(count)],
        has_gpu_build=torch.version.cuda is not None,
    )


def look_at_autoload() -> dict[str, Any]:
    """`import torch` as any other program does it, with the extensions that torch imports by itself."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        cause = error.__cause__ or error
        return broken(one_line(f"a plain `import torch` fails: {type(cause).__name__}: {cause}"))
    return ok("")


def look_at_torch_npu() -> dict[str, Any]:
    """torch_npu as `--device npu` loads it.

    Facts: `devices`, name and family of each; or `no_device`, why there is none, and `no_device_hint`.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return absent()
    from llm.errors import DeviceError
    from llm.runtime.npu import load_torch_npu, open_npu

    try:
        torch_npu = load_torch_npu()
    except DeviceError as error:
        return broken(error.message, hint=error.hint)
    version = _version_of("torch_npu") or str(torch_npu.__version__)
    try:
        first = open_npu(0)
    except DeviceError as error:
        return ok(version, no_device=error.message, no_device_hint=error.hint)
    names = [torch_npu.npu.get_device_name(index) for index in range(torch_npu.npu.device_count())]
    return ok(version, devices=[f"{name} (family {first.family.name})" for name in names])


def look_at_aclruntime() -> dict[str, Any]:
    """The half of ais_bench that is compiled against CANN."""
    if importlib.util.find_spec("aclruntime") is None:
        return absent()
    return _import_for_om("aclruntime")[0]


def look_at_ais_bench() -> dict[str, Any]:
    """The Python half, and of which generation; not the package that shares its name."""
    if importlib.util.find_spec("ais_bench") is None:
        return absent()
    said, interface = _import_for_om("ais_bench.infer.interface")
    if interface is not None:
        is_newer = hasattr(interface.InferSession, "set_context")
        is_newer = is_newer or importlib.util.find_spec("ais_bench.infer.interface_check") is not None
        said["found"] = ", ".join(filter(None, [said["found"], "of 2024 or newer" if is_newer else "as of 2023"]))
    return said


def _import_for_om(module_name: str) -> tuple[dict[str, Any], ModuleType | None]:
    from vision.backends.om_failures import import_failed

    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        failure = import_failed(error)
        return broken(failure.message, hint=failure.hint), None
    return ok(_version_of(module_name.partition(".")[0])), module


def look_at_package(name: str) -> dict[str, Any]:
    """A package by the name that pip knows; of onnxruntime also what it can compute on."""
    module_name = IMPORT_NAMES.get(name, name)
    if importlib.util.find_spec(module_name) is None:
        return absent()
    module = importlib.import_module(module_name)
    providers = module.get_available_providers() if name == "onnxruntime" else []
    return ok(", ".join([_version_of(name) or str(module.__version__), *providers]))


# What this process sees for itself: files, and programs with a time limit.


def _list_devices() -> dict[str, Any]:
    """What the driver's own tool says; facts: `names` as in its table, and `locked` device files."""
    facts = {"names": [], "locked": [str(file) for file in sorted(DEVICE_FILES[0].glob(DEVICE_FILES[1]))]}
    facts["locked"] = [file for file in facts["locked"] if not os.access(file, os.R_OK | os.W_OK)]
    tool = shutil.which("npu-smi")
    if tool is None:
        return absent() | facts
    ran = run_program([tool, "info"], environ=os.environ, seconds=OTHERS_S)
    if isinstance(ran, str):
        return broken(f"`npu-smi info` {ran}") | facts
    # | 0     310P3               | OK            | 16.4        45                0    / 0             |
    rows = re.findall(r"^\|\s*\d+\s+([\w-]+)\s*\|\s*([A-Za-z]+)\s*\|", ran.stdout, re.MULTILINE)
    if ran.returncode != 0 or not rows:
        return broken(f"`npu-smi info` lists no device: {last_line(ran.stderr) or last_line(ran.stdout)}") | facts
    driver = re.search(r"Version:\s*(\S+)", ran.stdout)
    names = [name if health == "OK" else f"{name} in health {health}" for name, health in rows]
    return ok(f"driver {driver[1]}" if driver else "") | facts | {"names": names}


def _look_at_atc() -> dict[str, Any]:
    try:
        tool = str(find_atc())
    except EncoderError:
        return absent()
    ran = run_program([tool, "--help"], environ=os.environ, seconds=OTHERS_S)
    if isinstance(ran, str):
        return broken(f"{tool} {ran}")
    if "cannot open shared object file" in (said := ran.stdout + ran.stderr):
        return broken(f"{tool}: {last_line(said)}")
    return ok(tool)


# Answers put into words.


def _probe(name: str, said: Mapping[str, Any]) -> Probe:
    hint = said["hint"] or ("" if said["state"] == "ok" else ADVICE[name])
    return Probe(name=name, state=said["state"], found=said["found"], hint=hint)


def _python() -> Probe:
    machine = f"{platform.system()} {platform.machine()}"
    return Probe(name="python", state="ok", found=f"{platform.python_version()}, {machine}, {sys.executable}")


def _autoload(extensions: list[str], said: Mapping[str, Any]) -> Probe:
    names = ", ".join(extensions)
    if said["state"] == "ok":
        return Probe(name="extensions", state="ok", found=f"`import torch` also imports {names}")
    hint = f"this project's commands load {names} only when asked; in other programs set {AUTOLOAD}=0, or uninstall it"
    return Probe(name="extensions", state="broken", found=said["found"], hint=hint)


def _gpus(torch: Mapping[str, Any]) -> Probe:
    if gpus := torch.get("gpus"):
        return Probe(name="CUDA devices", state="ok", found=_grouped(gpus))
    built = torch.get("has_gpu_build", True)
    hint = "the driver must list them: `nvidia-smi`" if built else "this torch is built without CUDA"
    return Probe(name="CUDA devices", state="absent", hint=hint)


def _toolkit(*, works: bool) -> Probe:
    """`works`: torch_npu found all libraries that it needs."""
    scripts, variable = cann.setup_scripts(os.environ), cann.home_variable(os.environ)
    libraries = cann.library_folder(os.environ)
    advice = f"source {scripts[0]}" if scripts else "source the `set_env.sh` of an installed CANN"
    if fault := cann.setup_fault(os.environ, works=works):
        return Probe(name="CANN", state="broken", found=fault, hint=f"{advice}, in a fresh shell")
    if variable is not None:
        versions = cann.package_versions(Path(os.environ[variable]))
        return Probe(name="CANN", state="ok", found=", ".join([*versions, os.environ[variable]]))
    if works or libraries is not None:
        return Probe(name="CANN", state="ok", found=f"libraries in {libraries or 'the system'}, version unknown")
    if scripts:
        found = f"installed in {scripts[0].parent}, and not set up in this shell"
        return Probe(name="CANN", state="broken", found=found, hint=advice)
    return Probe(name="CANN", state="absent", hint=ADVICE["CANN"])


def _accelerators(driver: Mapping[str, Any], torch_npu: Mapping[str, Any]) -> Probe:
    name, usable = "NPU devices", torch_npu.get("devices", [])
    listed = ", ".join(filter(None, [_grouped(usable or driver["names"]), driver["found"]]))
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


def _grouped(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
