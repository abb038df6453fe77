"""Whether CANN, the toolkit of Ascend devices, is set up in this shell: its variables, scripts and versions.

Nothing is loaded or run here. The checks of ASCEND_HOME_PATH and ASCEND_OPP_PATH are those of torch_npu 2.13 at import.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from llama_adapter.runtime.graphs.toolkit import installed_folders

HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by SCRIPT
SCRIPT = "set_env.sh"
LIBRARY = "libascendcl.so"


def home_variable(environ: Mapping[str, str]) -> str | None:
    """The variable that says where CANN is; it is set by `set_env.sh`."""
    return next((name for name in HOME_VARIABLES if environ.get(name)), None)


def library_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of LD_LIBRARY_PATH that has CANN's runtime library."""
    folders = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    return next((folder for folder in folders if (folder / LIBRARY).exists()), None)


def setup_scripts(environ: Mapping[str, str]) -> list[Path]:
    """The `set_env.sh` of all installations in the usual folders, newest form first."""
    return [folder / SCRIPT for folder in installed_folders(environ) if (folder / SCRIPT).exists()]


def setup_fault(environ: Mapping[str, str], *, works: bool = False) -> str:
    """What is wrong with the variables of this shell, empty when nothing is; `works`: the libraries were loaded."""
    variable = home_variable(environ)
    if variable is None:
        return ""
    home, operators = Path(environ[variable]), environ.get("ASCEND_OPP_PATH")
    if not home.is_dir():
        return f"{variable} is {home}, which does not exist"
    if operators is None:
        return f"{variable} is {home}, and ASCEND_OPP_PATH is not set"
    if not Path(operators).is_dir():
        return f"ASCEND_OPP_PATH is {operators}, which does not exist"
    if not works and library_folder(environ) is None:
        return f"{variable} is {home}, and no folder of LD_LIBRARY_PATH has {LIBRARY}"
    return ""


def package_versions(home: Path) -> list[str]:
    """Names and versions of what is installed there, the toolkit first: `toolkit 8.5.0`, `ops 8.5.0`, ..."""
    files = sorted(home.glob("*-linux/ascend_*_install.info"), key=lambda file: "toolkit" not in file.name)
    found = []
    for file in files:
        version = re.search(r"^version=(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        name = file.name.removeprefix("ascend_").removesuffix("_install.info")
        found.append(f"{name} {version[1] if version else 'of unknown version'}")
    return found
