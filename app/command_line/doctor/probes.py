"""Examines the environment, with one function per part. `environment.py` rates the answers.

The first half runs in child processes (runtime/child_process.py). The second half reads files, and runs programs with a
time limit. The checks of ASCEND_HOME_PATH and ASCEND_OPP_PATH are those that torch_npu 2.13 does at import.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import llama_adapter
from llama_adapter.runtime.child_process import absent, broken, last_line, ok, run_program
from llama_adapter.runtime.errors import DeviceError, GraphError, UsageError
from llama_adapter.runtime.graphs.onnx_provider import BY_NAME, CPU
from llama_adapter.runtime.graphs.toolkit import SET_ENV, find_atc, installed_folders, read_npu_smi
from llama_adapter.runtime.host_cpus import cpu_quota
from llama_adapter.runtime.text import counted, one_line
from llama_adapter.runtime.user_cache import cache_note

if TYPE_CHECKING:
    from llama_adapter.runtime.devices.npu import NpuBackend

IMPORT_NAMES = {
    "pillow": "PIL",
    "fastapi-offline": "fastapi_offline",
    "onnx-ir": "onnx_ir",
    "prometheus-client": "prometheus_client",
    "python-multipart": "python_multipart",
    "pyyaml": "yaml",
}
DEVICE_FILES = (Path("/dev"), "davinci[0-9]*")
HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # of CANN, set by its set_env.sh
LIBRARY = "libascendcl.so"
PROGRAM_S = 60.0


# These functions run in a child process.


def look_at_torch() -> dict[str, Any]:
    """Examine torch without its extensions. Facts: `gpus`, the answer on NVIDIA GPUs."""
    if importlib.util.find_spec("torch") is None:
        return absent()
    import torch

    count, threads, quota = torch.cuda.device_count(), torch.get_num_threads(), cpu_quota()
    limit = "" if quota is None else f" (the quota of its cgroup is {quota:g} processors)"
    gpus = {**absent(), "found": "none" if torch.version.cuda else "none, as this torch is built without CUDA"}
    if count:
        from llama_adapter.runtime.devices.cuda import open_cuda

        names, fault = [], ""
        for index in range(count):
            try:  # a driver may be too old, this torch without programs for the GPU, or its memory taken
                open_cuda(index)
                names.append(torch.cuda.get_device_name(index))
            except DeviceError as error:
                gpus, fault = broken(error.message, hint=error.hint), error.message
        if names:
            gpus = ok(grouped(names), hint=fault)
    return ok(f"{torch.__version__}, {counted(threads, 'thread')}{limit}", gpus=gpus)


def look_at_kernels() -> dict[str, Any]:
    """Examine this program's kernels for this processor. They are compiled now if they were not before."""
    from llama_adapter.runtime.kernels.library import find_library

    try:
        finding = find_library()
    except (DeviceError, UsageError) as error:  # commands end with it
        return broken(error.message, hint=error.hint)
    if finding.library is None:
        return {**absent(), "found": one_line(f"none: {finding.reason}")}
    return ok(one_line(f"{finding.variant} ({finding.origin}): float32, bfloat16, int8 and int4"), hint=cache_note())


def look_at_autoload() -> dict[str, Any]:
    """Try `import torch` as other programs do, with the extensions that torch imports by itself."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        cause = error.__cause__ or error
        return broken(one_line(f"a plain `import torch` fails: {type(cause).__name__}: {cause}"))
    return ok("")


def look_at_torch_npu() -> dict[str, Any]:
    """Examine torch_npu, loaded as for `--device npu`.

    Facts: `devices` (name and family of each) and `operators` (those of LLaMA-7B on the first device). Without a
    device: `no_device` (the reason) and `no_device_hint`.
    """
    if importlib.util.find_spec("torch_npu") is None:
        return absent()
    from llama_adapter.runtime.devices.npu import open_npu
    from llama_adapter.runtime.devices.npu_load import load_torch_npu

    try:
        torch_npu = load_torch_npu()
    except DeviceError as error:
        return broken(error.message, hint=error.hint)
    version = version_of("torch_npu") or str(torch_npu.__version__)
    try:
        first = open_npu(0)
    except DeviceError as error:
        return ok(version, no_device=error.message, no_device_hint=error.hint)
    names = [torch_npu.npu.get_device_name(index) for index in range(torch_npu.npu.device_count())]
    devices = [f"{name} (family {first.family.name})" for name in names]
    return ok(version, devices=devices, operators=_operators_of_7b(first))


def _operators_of_7b(backend: "NpuBackend") -> str:
    """Which operators are fused, and why others are not. This is looked up in tables; nothing is computed."""
    from llama_adapter.llm.config import DecoderConfig
    from llama_adapter.runtime.devices import DTYPES, EAGER
    from llama_adapter.runtime.schemes import QUANTISED

    config = DecoderConfig(
        vocab_size=32000, dim=4096, num_layers=32, num_heads=32, ffn_dim=11008, norm_eps=1e-6, context=512
    )
    backend.choose_operators(config, dtype=DTYPES["float16"], wanted="auto", mode=EAGER)
    own = [f"{choice.operator} by {choice.implementation}" for choice in backend.choices if choice.is_own]
    plain = [f"{choice.operator} ({choice.reason})" for choice in backend.choices if not choice.is_own]
    weights = [backend.choose_linear(precision, DTYPES["float16"]) for precision in QUANTISED]
    fewer = [f"{one.operator} {f'by {one.implementation}' if one.is_own else f'({one.reason})'}" for one in weights]
    text = f"LLaMA-7B in float16: {', '.join(own) or 'none of its own'}; plain: {', '.join(plain) or 'none'}"
    return f"{text}; {', '.join(fewer)}"


def look_at_aclruntime() -> dict[str, Any]:
    """Examine the part of ais_bench that is compiled against CANN."""
    if importlib.util.find_spec("aclruntime") is None:
        return absent()
    return _import_for_om("aclruntime")[0]


def look_at_ais_bench() -> dict[str, Any]:
    """Examine the Python part of ais_bench, and its generation. Another package on PyPI has the same name."""
    if importlib.util.find_spec("ais_bench") is None:
        return absent()
    said, interface = _import_for_om("ais_bench.infer.interface")
    if interface is not None:
        is_newer = hasattr(interface.InferSession, "set_context")
        is_newer = is_newer or importlib.util.find_spec("ais_bench.infer.interface_check") is not None
        said["found"] = ", ".join(filter(None, [said["found"], "of 2024 or newer" if is_newer else "as of 2023"]))
    return said


def _import_for_om(module_name: str) -> tuple[dict[str, Any], ModuleType | None]:
    from llama_adapter.runtime.graphs.om_failures import import_failed

    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        failure = import_failed(error)
        return broken(failure.message, hint=failure.hint), None
    return ok(version_of(module_name.partition(".")[0])), module


def look_at_packages(*names: str) -> dict[str, Any]:
    """Facts: `packages`, the answers on packages that can be imported in this process. They share common imports."""
    packages = {}
    for name in names:
        with suppress(Exception):
            packages[name] = look_at_package(name)
    return ok("", packages=packages)


def look_at_package(name: str) -> dict[str, Any]:
    """Examine a package, by its pip name; for onnxruntime, also its execution providers."""
    module_name = IMPORT_NAMES.get(name, name)
    if importlib.util.find_spec(module_name) is None:
        return absent()
    module = importlib.import_module(module_name)
    if not hasattr(module, "__path__"):  # all packages here are folders
        return broken(f"`{module.__file__}` is imported in its place", hint="rename that file, or look at PYTHONPATH")
    version = version_of(name) or str(module.__version__)
    if wanted := _unmet(name, version):
        return broken(f"{version}, and {wanted} is needed", hint=f"pip install '{wanted}'")
    if name != "onnxruntime":
        return ok(version)
    registered = set(module.get_available_providers())
    if CPU.name not in registered:
        return broken(
            f"{version}, without {CPU.name}", hint="install the package onnxruntime, which computes on the CPU"
        )
    return ok(", ".join([version, *(name for name in BY_NAME if name in registered)]))


def _unmet(name: str, version: str) -> str:
    """The requirement of this program that a package's version does not meet, such as `pillow>=12.3`; "" if none."""
    with suppress(ImportError):  # without packaging, or in a checkout that was not installed
        from packaging.requirements import Requirement

        required = map(Requirement, importlib.metadata.requires("llama-adapter") or ())
        wanted = [each for each in required if each.name == name]
        if not any(each.specifier.contains(version, prereleases=True) for each in wanted):
            return next((f"{name}{each.specifier}" for each in wanted), "")
    return ""


# These functions run in this process: they read files, and run programs with a time limit.


def list_devices() -> dict[str, Any]:
    """Examine the NPUs with the driver's tool. Facts: `names` as in its table, and `locked` device files."""
    facts = {"names": [], "locked": [str(file) for file in sorted(DEVICE_FILES[0].glob(DEVICE_FILES[1]))]}
    facts["locked"] = [file for file in facts["locked"] if not os.access(file, os.R_OK | os.W_OK)]
    tool = shutil.which("npu-smi")
    if tool is None:
        return absent() | facts
    ran = run_program([tool, "info"], environ=os.environ, seconds=PROGRAM_S)
    if isinstance(ran, str):
        return broken(f"`npu-smi info` {ran}") | facts
    table = read_npu_smi(ran.stdout)
    if ran.returncode != 0 or not table.devices:
        return broken(f"`npu-smi info` lists no device: {last_line(ran.stderr) or last_line(ran.stdout)}") | facts
    names = [npu.name if npu.health == "OK" else f"{npu.name} in health {npu.health}" for npu in table.devices]
    return ok(f"driver {table.driver}" if table.driver else "") | facts | {"names": names}


def look_at_cann(environ: Mapping[str, str], *, works: bool) -> dict[str, Any]:
    """Examine CANN: variables, scripts and versions. `works` means that torch_npu found all libraries that it needs."""
    scripts = [file for folder in installed_folders(environ) if (file := folder / "set_env.sh").exists()]
    folders = filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    libraries = next((folder for folder in folders if Path(folder, LIBRARY).exists()), "the system" if works else "")
    if variable := next((name for name in HOME_VARIABLES if environ.get(name)), None):
        home, operators = environ[variable], environ.get("ASCEND_OPP_PATH")
        if fault := _setup_fault(home, operators, variable=variable, has_libraries=bool(libraries)):
            return broken(fault, hint=f"{f'source {scripts[0]}' if scripts else SET_ENV}, in a fresh shell")
        return ok(", ".join([*_package_versions(Path(home)), home]))
    if libraries:
        return ok(f"libraries in {libraries}, version unknown")
    if scripts:
        found = f"installed in {scripts[0].parent}, and not set up in this shell"
        return broken(found, hint=f"source {scripts[0]}")
    return absent()


def _setup_fault(home: str, operators: str | None, *, variable: str, has_libraries: bool) -> str:
    """What is wrong with the variables of this shell; "" if they are right."""
    if not Path(home).is_dir():
        return f"{variable} is {home}, which does not exist"
    if operators is None:
        return f"{variable} is {home}, and ASCEND_OPP_PATH is not set"
    if not Path(operators).is_dir():
        return f"ASCEND_OPP_PATH is {operators}, which does not exist"
    return "" if has_libraries else f"{variable} is {home}, and no folder of LD_LIBRARY_PATH has {LIBRARY}"


def _package_versions(home: Path) -> list[str]:
    """Names and versions of the installed packages, the toolkit first: `toolkit 8.5.0`, `ops 8.5.0`, ..."""
    found = []
    for file in sorted(home.glob("*-linux/ascend_*_install.info"), key=lambda file: "toolkit" not in file.name):
        version = re.search(r"^version=(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        name = file.name.removeprefix("ascend_").removesuffix("_install.info")
        found.append(f"{name} {version[1] if version else 'of unknown version'}")
    return found


def look_at_atc() -> dict[str, Any]:
    """Examine ATC, and whether it starts."""
    try:
        tool = str(find_atc())
    except GraphError:
        return absent()
    ran = run_program([tool, "--help"], environ=os.environ, seconds=PROGRAM_S)
    if isinstance(ran, str):
        return broken(f"{tool} {ran}")
    if "cannot open shared object file" in (said := ran.stdout + ran.stderr):
        return broken(f"{tool}: {last_line(said)}")
    return ok(tool)


def grouped(names: list[str]) -> str:
    """`2 x NVIDIA L4, 1 x NVIDIA T4`."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def this_project() -> str:
    """The installed version of this project, and the folder of the copy that runs."""
    folder = Path(llama_adapter.__file__).resolve().parents[1]
    return f"{version_of('llama-adapter') or 'not installed'}, run from {folder}"


def version_of(distribution: str) -> str:
    """The version of an installed distribution; "" if pip did not install it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
