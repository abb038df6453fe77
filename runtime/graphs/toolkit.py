"""Finds CANN on this machine: its folders, ATC, and the chips that `npu-smi` lists.

Layouts are those of the CANN installation guides up to 8.3 (`ascend-toolkit/latest`) and since 8.5 (`cann`).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.runtime.errors import GraphError

ROOT_VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_INSTALL_PATH")  # set_env.sh sets them
# The installers' default folders, and CANN's names there, the newest form first.
INSTALL_FOLDERS: Final = ("/usr/local/Ascend", "~/Ascend")
TOOLKITS: Final = ("cann", "cann-*", "ascend-toolkit", "ascend-toolkit/latest", "nnrt", "nnrt/latest", "latest", ".")
SET_ENV: Final = "source <CANN>/set_env.sh (cann/ or, up to 8.3, ascend-toolkit/)"
_PLACES_OF_ATC: Final = (
    "bin",
    "compiler/bin",
    "atc/bin",
    "x86_64-linux/bin",
    "aarch64-linux/bin",
)
_NAME_THE_CHIP: Final = "name the chip that will run the OM: --soc-version Ascend310P3, Ascend910B3, ..."
_INFO_SECONDS: Final = 60
# `| 0     910B3         | OK   ...`: number, name, health. The line below it, of the chip, has a second number in the
# name's place, and on some boards `NA` in the health's.
_DEVICE_ROW: Final = re.compile(
    r"^\|\s*(\d+)\s+((?:Ascend)?\d{3}[A-Za-z]*\d*(?:[-_]\w+)*|Ascend\w+)\s*\|\s*([A-Za-z]+)\s*\|", re.MULTILINE
)
_DRIVER: Final = re.compile(r"Version:\s*(\S+)")
_FAMILY_ONLY: Final = re.compile(r"(?:Ascend)?(?:910|950)(?:PR|DT)?", re.IGNORECASE)  # says no more than the series


@dataclass(frozen=True, kw_only=True, slots=True)
class Npu:
    """A device as `npu-smi info` lists it."""

    number: int
    name: str  # `310P3`, `910B3`, or of later chips only the series
    health: str  # `OK`, `Warning`, `Alarm`, `Critical`, ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NpuTable:
    """What `npu-smi info` says."""

    driver: str  # its version, empty where the table has none
    devices: tuple[Npu, ...]


def toolkit_folders(environ: Mapping[str, str]) -> list[Path]:
    """Existing folders that may hold CANN's toolkit: those in the environment, then the usual ones."""
    named = [Path(environ[name]) for name in ROOT_VARIABLES if environ.get(name)]
    folders = [folder for root in named for folder in (root, root / "latest")]
    return [folder for folder in folders if folder.is_dir()] + installed_folders(environ)


def installed_folders(environ: Mapping[str, str]) -> list[Path]:
    """The usual folders of CANN that exist, whatever the environment names, the newest form first."""
    bases = [Path(folder.replace("~", environ.get("HOME", "~"), 1)) for folder in INSTALL_FOLDERS]
    candidates = [place for base in bases for form in TOOLKITS for place in _expanded(base, form)]
    return [place for place in candidates if place.is_dir()]


def _expanded(base: Path, form: str) -> list[Path]:
    return sorted(base.glob(form), reverse=True) if "*" in form else [base / form]


def read_npu_smi(text: str) -> NpuTable:
    """The table of `npu-smi info`; without devices for any other text."""
    driver = _DRIVER.search(text)
    devices = tuple(
        Npu(number=int(number), name=name, health=health) for number, name, health in _DEVICE_ROW.findall(text)
    )
    return NpuTable(driver=driver[1] if driver else "", devices=devices)


def find_atc(environ: Mapping[str, str] | None = None) -> Path:
    """The `atc` on PATH, else of the toolkit in the environment, else of the usual folders.

    Raises GraphError where there is none.
    """
    variables = os.environ if environ is None else environ
    on_path = shutil.which("atc", path=variables.get("PATH", ""))
    if on_path:
        return Path(on_path)
    for root in toolkit_folders(variables):
        for place in _PLACES_OF_ATC:
            candidate = root / place / "atc"
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    raise GraphError(
        "There is no `atc` on PATH, nor in the usual folders of the Ascend toolkit",
        hint="install CANN's toolkit and `source` its set_env.sh; or take the line of --print-command to a machine "
        "that has it (no Ascend chip is needed there)",
    )


def detect_soc_version() -> str:
    """The chip of this machine as `--soc_version` takes it, from `npu-smi info`; raises GraphError."""
    devices = read_npu_smi(_npu_smi("info")).devices
    if not devices:
        raise GraphError("`npu-smi info` lists no Ascend chip", hint=_NAME_THE_CHIP)
    versions = sorted({_soc_version(device.number, device.name) for device in devices})
    if len(versions) > 1:
        raise GraphError(f"This machine has several kinds of chips: {', '.join(versions)}", hint=_NAME_THE_CHIP)
    return versions[0]


def soc_from_board(text: str) -> str | None:
    """`<Chip Name>_<NPU Name>` of `npu-smi info -t board -i 0 -c 0`, as A3 and 950 are called; None without them."""
    facts = {
        key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    chip, npu = facts.get("chip name"), facts.get("npu name")
    if not chip or not npu or "NA" in (chip, npu):
        return None
    return f"{_with_prefix(chip)}_{npu}"


def _soc_version(device: int, name: str) -> str:
    """The table has the full names of 310P and A2, and of later chips only the series."""
    if not _FAMILY_ONLY.fullmatch(name):
        return _with_prefix(name)
    soc = soc_from_board(_npu_smi("info", "-t", "board", "-i", str(device), "-c", "0"))
    if soc is None:
        raise GraphError(
            f"`npu-smi info` calls the chip {name}, which is a whole series, and its board says no more",
            hint="--soc-version is <Chip Name>_<NPU Name> of `npu-smi info -t board -i 0 -c 0`, "
            "for example Ascend910_9391",
        )
    return soc


def _with_prefix(name: str) -> str:
    return name if name.startswith("Ascend") else f"Ascend{name}"


def _npu_smi(*arguments: str) -> str:
    program = shutil.which("npu-smi")
    if program is None:
        raise GraphError("There is no `npu-smi` here, so the chip of this machine is not known", hint=_NAME_THE_CHIP)
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=_INFO_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GraphError(f"`npu-smi` gives no answer: {error}", hint=_NAME_THE_CHIP) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:300]
        raise GraphError(f"`npu-smi {' '.join(arguments)}` failed: {said}", hint=_NAME_THE_CHIP)
    return done.stdout
