"""Where ATC is on this machine, and which chip its result is for. Nothing is converted here."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from vision.errors import EncoderError

_ROOT_VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_INSTALL_PATH")
_INSTALL_FOLDERS: Final = ("/usr/local/Ascend", "~/Ascend")
_TOOLKITS: Final = ("cann", "ascend-toolkit/latest", "latest", "")
_PLACES_OF_ATC: Final = (
    "bin",
    "compiler/bin",
    "atc/bin",
    "x86_64-linux/bin",
    "aarch64-linux/bin",
)
_NAME_THE_CHIP: Final = "name the chip that will run the OM: --soc-version Ascend310P3, Ascend910B3, ..."
_INFO_SECONDS: Final = 60
# `| 0     910B3         | OK   ...`: number and name; the line below it, of the chip, has a second number there.
_DEVICE_ROW: Final = re.compile(
    r"^\|\s*(\d+)\s+((?:Ascend)?\d{3}[A-Za-z]*\d*(?:[-_]\w+)*|Ascend\w+)\s*\|", re.MULTILINE
)
_FAMILY_ONLY: Final = re.compile(r"(?:Ascend)?(?:910|950)(?:PR|DT)?", re.IGNORECASE)  # says no more than the series


def find_atc(environment: Mapping[str, str] | None = None) -> Path:
    """The `atc` on PATH, else of the toolkit that the environment names, else of the usual folders.

    Raises EncoderError where there is none.
    """
    variables = os.environ if environment is None else environment
    on_path = shutil.which("atc", path=variables.get("PATH", ""))
    if on_path:
        return Path(on_path)
    for root in _roots(variables):
        for place in _PLACES_OF_ATC:
            candidate = root / place / "atc"
            if candidate.is_file() and os.access(candidate, os.X_OK):
                return candidate
    raise EncoderError(
        "There is no `atc` on PATH, nor in the usual folders of the Ascend toolkit",
        hint="install CANN's toolkit and `source` its set_env.sh; or take the line of --print-command to a machine "
        "that has it (no Ascend chip is needed there)",
    )


def _roots(variables: Mapping[str, str]) -> Iterator[Path]:
    for name in _ROOT_VARIABLES:
        if variables.get(name):
            yield Path(variables[name])
            yield Path(variables[name]) / "latest"
    for folder in _INSTALL_FOLDERS:
        for toolkit in _TOOLKITS:
            yield Path(folder).expanduser() / toolkit


def detect_soc_version() -> str:
    """The chip of this machine as `--soc_version` takes it, from `npu-smi info`; raises EncoderError."""
    names = soc_names(_npu_smi("info"))
    if not names:
        raise EncoderError("`npu-smi info` lists no Ascend chip", hint=_NAME_THE_CHIP)
    versions = sorted({_soc_version(device, name) for device, name in names})
    if len(versions) > 1:
        raise EncoderError(f"This machine has several kinds of chips: {', '.join(versions)}", hint=_NAME_THE_CHIP)
    return versions[0]


def soc_names(table: str) -> list[tuple[int, str]]:
    """Number and name of each device in the table of `npu-smi info`: `[(0, "910B3"), ...]`."""
    return [(int(number), name) for number, name in _DEVICE_ROW.findall(table)]


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
    """The table names 310P and A2 in full, of later chips it only tells the series."""
    if not _FAMILY_ONLY.fullmatch(name):
        return _with_prefix(name)
    soc = soc_from_board(_npu_smi("info", "-t", "board", "-i", str(device), "-c", "0"))
    if soc is None:
        raise EncoderError(
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
        raise EncoderError("There is no `npu-smi` here, so this machine does not say its chip", hint=_NAME_THE_CHIP)
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=_INFO_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EncoderError(f"`npu-smi` gives no answer: {error}", hint=_NAME_THE_CHIP) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:300]
        raise EncoderError(f"`npu-smi {' '.join(arguments)}` failed: {said}", hint=_NAME_THE_CHIP)
    return done.stdout
