"""An OM that ATC made elsewhere, by the line of --print-command, as if it had been made here. ATC is not run."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.atc import OM_MODE, AtcRequest, describe
from llama_adapter.runtime.graphs.graph import Graph
from llama_adapter.runtime.graphs.sidecar import check_om_file, check_om_path, write_sidecar


def adopt_om(request: AtcRequest, *, graph: Graph) -> Path:
    """Write the side-car of the OM `request.output` and take from others the right to write it; returns its path.

    What the side-car says is the caller's word but for the digests: only a device can tell whether it is so. Raises
    GraphError for a file that InferSession would refuse all the same.
    """
    target = Path(os.path.abspath(request.output))
    check_om_path(target)
    with suppress(FileNotFoundError):  # told below
        if stat.S_ISREG(os.lstat(target).st_mode):
            _close_to_others(target)
    check_om_file(target)
    write_sidecar(target, describe(request, target, graph=graph))
    return target


def _close_to_others(file: Path) -> None:
    try:
        file.chmod(OM_MODE)
    except OSError as error:
        raise GraphError(
            f"The mode of the OM `{file}` cannot be set: {error.strerror}", hint="copy the file, so that it is yours"
        ) from None
