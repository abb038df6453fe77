"""Finds CANN's folders and ATC, and reads the chips from the output of `npu-smi`.

The folders follow the CANN installation guides up to 8.3 (`ascend-toolkit/latest`) and since 8.5 (`cann`).
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
# The installers' default folders, and the names of CANN's folders in them, newest first.
INSTALL_FOLDERS: Final = ("/usr/local/Ascend", "~/Ascend")
TOOLKITS: Final = ("cann", "cann-*", "ascend-toolkit", "ascend-toolkit/latest", "nnrt", "nnrt/latest", "latest", ".")
SET_ENV: Final = "source <CANN>/set_env.sh (cann/ or, up to 8.3, ascend-toolkit/)"
_ATC_FOLDERS: Final = ("bin", "compiler/bin", "atc/bin", "x86_64-linux/bin", "aarch64-linux/bin")
_NAME_THE_CHIP: Final = "name the chip that will run the OM: --soc-version Ascend310P3, Ascend910B3, ..."
_INFO_SECONDS: Final = 60
# `| 0     910B3         | OK   ...`: number, name, health. The next line of the table describes the chip. It has a
# number instead of the name and, on some boards, `NA` instead of the health.
_DEVICE_ROW: Final = re.compile(
    r"^\|\s*(\d+)\s+((?:Ascend)?\d{3}[A-Za-z]*\d*(?:[-_]\w+)*|Ascend\w+)\s*\|\s*([A-Za-z]+)\s*\|", re.MULTILINE
)
_DRIVER: Final = re.compile(r"Version:\s*(\S+)")
_FAMILY_ONLY: Final = re.compile(r"(?:Ascend)?(?:910|950)(?:PR|DT)?", re.IGNORECASE)  # the series only


@dataclass(frozen=True, kw_only=True, slots=True)
class Npu:
    """A device in the table of `npu-smi info`."""

    number: int
    name: str  # `310P3`, `910B3`; for later chips only the series
    health: str  # `OK`, `Warning`, `Alarm`, `Critical`, ...


@dataclass(frozen=True, kw_only=True, slots=True)
class NpuTable:
    """The table of `npu-smi info`."""

    driver: str  # version; empty if the table has none
    devices: tuple[Npu, ...]


def toolkit_folders(environ: Mapping[str, str]) -> list[Path]:
    """Existing folders that may contain CANN's toolkit: first those named in `environ`, then the default ones."""
    named = [Path(environ[name]) for name in ROOT_VARIABLES if environ.get(name)]
    folders = [folder for root in named for folder in (root, root / "latest")]
    return [folder for folder in folders if folder.is_dir()] + installed_folders(environ)


def installed_folders(environ: Mapping[str, str]) -> list[Path]:
    """The default folders of CANN that exist, newest first. HOME is the only variable that is used."""
    bases = [Path(folder.replace("~", environ.get("HOME", "~"), 1)) for folder in INSTALL_FOLDERS]
    candidates = [
        place
        for base in bases
        for name in TOOLKITS
        for place in (sorted(base.glob(name), reverse=True) if "*" in name else [base / name])
    ]
    return [place for place in candidates if place.is_dir()]


def read_npu_smi(text: str) -> NpuTable:
    """Parse the table of `npu-smi info`. Any other text gives a table without devices."""
    driver = _DRIVER.search(text)
    devices = tuple(
        Npu(number=int(number), name=name, health=health) for number, name, health in _DEVICE_ROW.findall(text)
    )
    return NpuTable(driver=driver[1] if driver else "", devices=devices)


def find_atc(environ: Mapping[str, str] | None = None) -> Path:
    """The `atc` on PATH, else in the toolkit that the environment names, else in the default folders.

    Raises GraphError if there is none.
    """
    variables = os.environ if environ is None else environ
    if on_path := shutil.which("atc", path=variables.get("PATH", "")):
        return Path(on_path)
    for root in toolkit_folders(variables):
        for place in _ATC_FOLDERS:
            candidate = root / place / "atc"
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    raise GraphError(
        "There is no `atc` on PATH or in the default folders of the Ascend toolkit",
        hint="install CANN's toolkit and `source` its set_env.sh; or run the command of --print-command on a machine "
        "that has it (no Ascend chip is needed)",
    )


def detect_soc_version() -> str:
    """The value of `--soc_version` for the chip of this machine, from `npu-smi info`. Raises GraphError."""
    devices = read_npu_smi(_npu_smi("info")).devices
    if not devices:
        raise GraphError("`npu-smi info` lists no Ascend chip", hint=_NAME_THE_CHIP)
    versions = sorted({_soc_version(device.number, device.name) for device in devices})
    if len(versions) > 1:
        raise GraphError(f"This machine has several kinds of chips: {', '.join(versions)}", hint=_NAME_THE_CHIP)
    return versions[0]


def soc_from_board(text: str) -> str | None:
    """`<Chip Name>_<NPU Name>` from `npu-smi info -t board -i 0 -c 0`, for A3 and 950; None if one is missing."""
    facts = {
        key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())
    }
    chip, npu = facts.get("chip name"), facts.get("npu name")
    if not chip or not npu or "NA" in (chip, npu):
        return None
    return f"{_with_prefix(chip)}_{npu}"


def _soc_version(device: int, name: str) -> str:
    """The full name of a chip. The table has it for 310P and A2, but only the series for later chips."""
    if not _FAMILY_ONLY.fullmatch(name):
        return _with_prefix(name)
    soc = soc_from_board(_npu_smi("info", "-t", "board", "-i", str(device), "-c", "0"))
    if soc is None:
        raise GraphError(
            f"`npu-smi info` calls the chip {name}, which is a series, and its board has no full name",
            hint="--soc-version is <Chip Name>_<NPU Name> of `npu-smi info -t board -i 0 -c 0`, "
            "for example Ascend910_9391",
        )
    return soc


def _with_prefix(name: str) -> str:
    return name if name.startswith("Ascend") else f"Ascend{name}"


def _npu_smi(*arguments: str) -> str:
    program = shutil.which("npu-smi")
    if program is None:
        raise GraphError("There is no `npu-smi` on PATH, so the chip of this machine is unknown", hint=_NAME_THE_CHIP)
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=_INFO_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GraphError(f"`npu-smi` did not answer: {error}", hint=_NAME_THE_CHIP) from None
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())[:300]
        raise GraphError(f"`npu-smi {' '.join(arguments)}` failed: {output}", hint=_NAME_THE_CHIP)
    return done.stdout
