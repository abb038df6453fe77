"""Fixtures of the tests of `app`."""

import dataclasses
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.command_line.main import main
from tests.app.command import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | list[str]) -> Ran:
        flat = [part for given in arguments for part in ([given] if isinstance(given, str) else given)]
        if flat[0] in ("caption", "ask") and "--reader" not in flat:
            flat += ["--reader", "thread"]  # starting reader processes takes longer than these tests' work
        code = main(flat)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Ran(code, out, err)

    return run


@pytest.fixture(scope="module")
def models_placed_once() -> Iterator[Callable[[], None]]:
    """A model that was loaded before has the same weights, and a runner of its own, while its files are the same.

    For files whose tests load the same models again and again and are not about loading, which takes half of their
    time. Encoder, tokenizer and detector are shared. Returns a function that forgets the models; a test that changes
    how they are loaded uses `forget_models`.
    """
    from llama_adapter.app.captioning import assemble
    from llama_adapter.app.models import memory_fit
    from llama_adapter.app.models.known import marks_of
    from llama_adapter.runtime.kernels.instruction_sets import CHOICE

    known: dict[str, tuple[Any, Any]] = {}
    load, place = assemble.assemble_with_torch, memory_fit.place_decoder
    placed: list[Any] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        placed.append(place(*arguments, **options))
        return placed[-1]

    def assembled(spec: Any) -> Any:
        marks = marks_of(spec)
        if marks is None:  # on another device, with other processes, or as large as the memory
            return load(spec)
        key = repr((spec, sorted(marks.items()), os.environ.get(CHOICE)))
        if key not in known:
            placed.clear()
            parts = load(spec)
            if not placed:
                return parts
            known[key] = parts, placed.pop()
            return parts
        parts, decoder = known[key]
        return dataclasses.replace(parts, runner=decoder.runner(parts.runner.config.num_slots))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(assemble, "assemble_with_torch", assembled)
        patched.setattr(memory_fit, "place_decoder", noted)
        yield known.clear


@pytest.fixture
def forget_models(models_placed_once: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """The function that forgets the models: call it after a change of how they are loaded. The end of the test does."""
    yield models_placed_once
    models_placed_once()


@pytest.fixture
def known_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `doctor` examine only the model: the table of the environment takes many processes, and has its own tests."""
    from llama_adapter.app.command_line.doctor.environment import Probe

    known = [Probe(name="python", state="ok")]
    monkeypatch.setattr("llama_adapter.app.command_line.doctor.command.look_at_environment", lambda: known)


@pytest.fixture
def odd_modes() -> Iterator[Callable[[Path], dict[str, str]]]:
    """The test has a umask that no program chooses. Returns a function of a folder or file.

    The function finds the folders and files that have another mode than new ones get, with that mode.
    """
    from llama_adapter.runtime.graphs.sidecar import OM_MODE
    from tests.parity.exported import ODD_UMASK  # this imports torch, which other tests of the room do without

    def odd_modes(place: Path) -> dict[str, str]:
        found = {}
        for path in [place] if place.is_file() else place.rglob("*"):
            most = 0o777 if path.is_dir() else OM_MODE if path.name.endswith((".om", ".om.json")) else 0o666
            if (mode := stat.S_IMODE(path.stat().st_mode)) != most & ~ODD_UMASK:
                found[path.name] = f"{mode:o}"
        return found

    before = os.umask(ODD_UMASK)
    yield odd_modes
    os.umask(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three pictures."""
    from tests.app.golden import NAMES, picture  # as above

    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in NAMES:
        shutil.copy(picture(name), folder / name)
    return folder
