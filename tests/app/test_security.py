"""Files from others run nothing, as SECURITY.md says of each kind."""

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.command_line.settings_file import read_settings
from llama_adapter.app.jobs.questions import TemplateError, fill
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import Columns
from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.checkpoint import LAST, read_checkpoint
from llama_adapter.app.learning.training.results import DATA, require_same_run
from llama_adapter.app.learning.training.run_log import LOG, read_log
from llama_adapter.app.pictures.prefixes.file import read_prefix_file
from llama_adapter.llm.weights.lora import open_loras
from llama_adapter.llm.weights.past import read_past
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.tensor_files.files import read_tensor_file
from tests.app.command import Run
from tests.llm import toys


class Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def pickled(target: Path) -> bytes:
    return pickle.dumps({"prompt_embeddings": Touches(target)})


def saved_by_torch(target: Path) -> bytes:
    torch.save({"prompt_embeddings": Touches(target)}, file := io.BytesIO())
    return file.getvalue()


def saved_by_numpy(target: Path) -> bytes:
    np.save(file := io.BytesIO(), np.array([Touches(target)], dtype=object))
    return file.getvalue()


def with_pickle_in_peft(folder: Path, content: bytes) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "PREFIX_TUNING"}')
    (folder / "adapter_model.bin").write_bytes(content)
    read_past(folder, toys.CONFIG)


def with_pickle_in_lora(folder: Path, content: bytes) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    (folder / "adapter_model.bin").write_bytes(content)
    open_loras([str(folder)], toys.CONFIG)


def with_encoding(folder: Path, content: bytes) -> None:
    cache = EncodedCache(folder, encoder="a", shape=(2, 4), dtype=torch.float32)
    cache.put("ab" * 32, torch.zeros(2, 4))
    next(folder.rglob("*.safetensors")).write_bytes(content)
    assert "ab" * 32 not in EncodedCache(folder, encoder="a", shape=(2, 4), dtype=torch.float32)


def reading(name: str, read: Callable[[Path], object]) -> Callable[[Path, bytes], None]:
    def write_and_read(folder: Path, content: bytes) -> None:
        (folder / name).write_bytes(content)
        read(folder / name)

    return write_and_read


READERS: Final[dict[str, Callable[[Path, bytes], None]]] = {
    "checkpoint": reading("a.pth", read_tensor_file),
    "prefix file": reading("a.safetensors", read_prefix_file),
    "past keys and values": reading("a.npy", lambda path: read_past(path, toys.CONFIG)),
    "prefix tuning of PEFT": with_pickle_in_peft,
    "LoRA of PEFT": with_pickle_in_lora,
    "checkpoint of a run": reading(LAST, read_checkpoint),
    "log of a run": reading(LOG, read_log),
    "data of a run": reading(DATA, lambda path: require_same_run(path.parent, "a")),
    "encoding of a run": with_encoding,
    "labelled data": reading("a.jsonl", lambda path: read_examples(str(path), columns=Columns())),
    "settings": reading("a.yaml", lambda path: read_settings(str(path))),
}


@pytest.mark.parametrize("make", [pickled, saved_by_torch, saved_by_numpy])
@pytest.mark.parametrize("kind", READERS)
def test_objects_in_a_file_are_not_loaded(kind: str, make: Callable[[Path], bytes], tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    with suppress(LlamaAdapterError):
        READERS[kind](tmp_path / "given", make(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_objects_of_this_test_would_run(tmp_path: Path) -> None:
    pickle.loads(pickled(tmp_path / "run"))
    assert (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["--model_path $(touch run)\n", "--model_path `touch run`; touch run\n"])
def test_a_command_line_of_another_system_is_read_and_not_run(
    text: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(text)
    for command in (["caption", "a.png", "--config", "run.sh"], ["config", "import", "run.sh"]):
        assert run(command).code != 0 or command[0] == "config"
    assert not Path("run").exists()


@pytest.mark.parametrize("text", ["{name.__class__}", "{name!r:>9999999999}", "{name[0]}", "{0}"])
def test_variables_of_questions_are_names_and_no_expressions(text: str) -> None:
    question = Question(instruction=text)
    with suppress(TemplateError):
        assert fill(question, {"name": "a.png"}).instruction == text


def test_a_program_of_run_reference_has_the_rights_of_its_user(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("from pathlib import Path\nPath('run').touch()\n")
    assert run("run-reference", "program.py").code == 0
    assert Path("run").exists()
