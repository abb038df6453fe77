"""Which heavy modules a command imports. They decide how fast it starts."""

import shutil
from pathlib import Path

from llama_adapter.app.models.resources import embedded_model, sample_pictures
from tests.app.command import run_several

HEAVY = {
    *("torch", "numpy", "PIL", "safetensors", "sentencepiece", "tokenizers", "huggingface_hub", "jinja2", "gguf"),
    *("gradio", "fastapi", "uvicorn", "ray", "onnxruntime", "transformers", "asyncio", "ssl", "importlib.metadata"),
}
HELP = "|caption|ask|encode|convert|quantize|export om|serve|bench|doctor"
USAGE = ("", "export", "paint", "caption", "caption x.png --top-p 3", "caption x.png --adapter x.pth")
PICTURE = str(next(sample_pictures().glob("*.png")))
ANSWERING = {"numpy", "PIL", "safetensors", "sentencepiece", "importlib.metadata"}  # with a bundle


def imported(*commands: list[str], code: int = 0, said: str = "") -> set[str]:
    """The heavy modules that a process imports for these commands. Each says `said` on stderr."""
    ran = run_several(commands)
    assert [one.code for one in ran] == [code] * len(commands), ran
    assert code == 0 or not any(one.out for one in ran)
    assert all(said in one.told for one in ran), ran
    return HEAVY & {*ran[-1].modules}


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    commands = [f"{command} --help".split() for command in HELP.split("|")]
    assert imported(*commands, ["--version"], ["tasks"]) == set()
    assert imported(*(line.split() for line in USAGE), code=2) == set()


def test_an_unknown_model_is_refused_without_torch() -> None:
    """Other faults of the same command, such as a device that is not there, are found with torch."""
    unknown = ["--model", "nonsense"]
    flags = ("", "--batch-size auto", "--device cuda", "--tensor-parallel 2")
    commands = (["caption", PICTURE, *unknown, *words.split()] for words in flags)
    generate = ["generate", "--prompt", "a", *unknown]
    assert imported(*commands, generate, code=1, said="`nonsense` is no model bundle") <= ANSWERING


def test_a_bundle_answers_without_torch_at_its_first_use_and_a_command_that_finds_all_answers_imports_no_model(
    tmp_path: Path,
) -> None:
    out, bundle = str(tmp_path / "answers.jsonl"), shutil.copytree(embedded_model(), tmp_path / "bundle")
    job = ["caption", PICTURE, "--model", str(bundle), "--out", out]
    assert imported(job, [*job, "--overwrite", "--precision", "int4", "--dtype", "bfloat16"]) <= ANSWERING

    imported([*job, "--overwrite"])
    assert imported(job) <= {"numpy", "importlib.metadata"}
    assert imported(["export-records", out, "--to", "csv", "--out", str(tmp_path / "answers.csv")]) <= {"numpy"}
