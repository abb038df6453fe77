"""Which heavy modules a command imports. They decide how fast it starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llama_adapter.app.models.resources import sample_pictures

HEAVY = {
    *("torch", "numpy", "PIL", "safetensors", "sentencepiece", "tokenizers", "huggingface_hub", "jinja2", "gguf"),
    *("gradio", "fastapi", "uvicorn", "ray", "onnxruntime", "transformers", "asyncio", "ssl", "importlib.metadata"),
}
PROGRAM = """
import json, sys
from llama_adapter.__main__ import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""
PICTURE = str(next(sample_pictures().glob("*.png")))


def imported(*arguments: str) -> set[str]:
    """The heavy modules that a command imports."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    code, modules = json.loads(ran.stderr.splitlines()[-1])
    assert code == 0, ran.stderr
    return HEAVY & set(modules)


@pytest.mark.parametrize("arguments", [("--help",), ("caption", "--help"), ("serve", "--help"), ("tasks",)], ids=str)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert imported(*arguments) == set()


def test_a_known_model_answers_without_torch_and_a_command_that_finds_all_answers_imports_no_model(
    tmp_path: Path,
) -> None:
    out = str(tmp_path / "answers.jsonl")
    job = ("caption", PICTURE, "--out", out)
    imported(*job)  # the first use may have to lay out the weights
    assert imported(*job, "--overwrite") <= {"numpy", "PIL", "safetensors", "sentencepiece", "importlib.metadata"}

    assert imported(*job) <= {"numpy", "importlib.metadata"}
    assert imported("export-records", out, "--to", "csv", "--out", str(tmp_path / "answers.csv")) <= {"numpy"}
