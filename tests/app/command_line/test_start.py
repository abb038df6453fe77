"""Which heavy modules a command imports. They decide how fast it starts."""

import json
import subprocess
import sys
from pathlib import Path

from llama_adapter.app.models.resources import sample_pictures

HEAVY = {
    *("torch", "numpy", "PIL", "safetensors", "sentencepiece", "tokenizers", "huggingface_hub", "jinja2", "gguf"),
    *("gradio", "fastapi", "uvicorn", "ray", "onnxruntime", "transformers", "asyncio", "ssl", "importlib.metadata"),
}
PROGRAM = """
import json, sys
from llama_adapter.__main__ import main
codes = [int(main(words)) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, sorted(sys.modules)]), file=sys.stderr)
"""
HELP = "|caption|ask|encode|convert|quantize|export om|serve|bench|doctor"
USAGE = ("", "export", "paint", "caption", "caption x.png --top-p 3", "caption x.png --adapter x.pth")
PICTURE = str(next(sample_pictures().glob("*.png")))


def imported(*commands: list[str], code: int = 0) -> set[str]:
    """The heavy modules that a process imports for these commands."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(commands)], capture_output=True, text=True)
    codes, modules = json.loads(ran.stderr.splitlines()[-1])
    assert codes == [code] * len(commands), ran.stderr
    assert code == 0 or ran.stdout == ""
    return HEAVY & set(modules)


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    commands = [f"{command} --help".split() for command in HELP.split("|")]
    assert imported(*commands, ["--version"], ["tasks"]) == set()
    assert imported(*(line.split() for line in USAGE), code=2) == set()


def test_a_known_model_answers_without_torch_and_a_command_that_finds_all_answers_imports_no_model(
    tmp_path: Path,
) -> None:
    out = str(tmp_path / "answers.jsonl")
    job = ["caption", PICTURE, "--out", out]
    imported(job)  # the first use may have to lay out the weights
    assert imported([*job, "--overwrite"]) <= {"numpy", "PIL", "safetensors", "sentencepiece", "importlib.metadata"}

    assert imported(job) <= {"numpy", "importlib.metadata"}
    assert imported(["export-records", out, "--to", "csv", "--out", str(tmp_path / "answers.csv")]) <= {"numpy"}
