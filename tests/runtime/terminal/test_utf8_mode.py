"""Names of pictures are the same in every locale."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama_adapter.app.models.resources import sample_pictures

LOCALES = [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}]


@pytest.mark.parametrize("variables", LOCALES, ids=["C", "UTF-8"])
def test_names_are_utf8_in_every_locale(tmp_path: Path, variables: dict[str, str]) -> None:
    picture = next(path for path in sorted(Path(sample_pictures()).iterdir()) if path.suffix == ".png")
    names = ["grün.png", os.fsdecode(b"inv\xff.png")]
    for name in names:
        shutil.copy(picture, tmp_path / name)
    command = [sys.executable, "-m", "llama_adapter", "caption", ".", "nö.png", "--prompt", "Größe?", "--quiet"]
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, check=False)

    records = [json.loads(line) for line in ran.stdout.decode().splitlines()]
    assert {one["picture"] for one in records} == {*(f"./{name}" for name in names), "nö.png"}
    assert {one["prompt"] for one in records} == {"Größe?"}
    assert [one["picture"] for one in records if one["error"]] == ["nö.png"]
    assert ran.returncode == 3
