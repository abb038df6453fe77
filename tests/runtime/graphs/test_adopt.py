"""An OM that ATC made by a printed line is afterwards like one that was made here."""

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.adopt import adopt_om
from llama_adapter.runtime.graphs.atc import command, make_om
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.sidecar import read_sidecar
from tests.runtime.graphs.test_atc import atc, file, planned

pytestmark = pytest.mark.slow

__all__ = ["atc", "file"]  # the fixtures


@pytest.mark.parametrize("gears", [False, True])
def test_an_adopted_om_has_the_side_car_and_the_mode_of_one_made_here(
    file: Path, atc: Path, tmp_path: Path, gears: bool
) -> None:
    request, here = (planned(file, tmp_path / name / "clip", gears=gears)[0] for name in ("there", "here"))
    (tmp_path / "there").mkdir()
    subprocess.run([atc, *command(request)], check=True, cwd=tmp_path, capture_output=True)
    assert stat.S_IMODE(request.output.stat().st_mode) == 0o666

    made = adopt_om(request, graph=read_graph(file))

    assert made == request.output
    assert stat.S_IMODE(made.stat().st_mode) == 0o640
    assert read_sidecar(made) == read_sidecar(make_om(here, atc=atc, graph=read_graph(file)))


@pytest.mark.parametrize(
    ("kind", "said"), [("none", "does not exist"), ("link", "symbolic link"), ("empty", "is empty")]
)
def test_what_the_runtime_would_refuse_is_not_adopted(file: Path, tmp_path: Path, kind: str, said: str) -> None:
    request: Any = planned(file, tmp_path / "clip")[0]
    if kind == "link":
        request.output.symlink_to(file)
    elif kind == "empty":
        request.output.touch()

    with pytest.raises(GraphError, match=said):
        adopt_om(request, graph=read_graph(file))

    assert not (tmp_path / "clip_bs1.om.json").exists()
