"""Which heavy modules a command imports. They decide how fast it starts."""

import shutil
from pathlib import Path

from llama_adapter.app.models.resources import embedded_model, sample_pictures
from tests.app.command import run_several
from tests.app.golden import ROOT

HEAVY = {
    *("torch", "numpy", "PIL", "safetensors", "sentencepiece", "tokenizers", "huggingface_hub", "jinja2", "gguf"),
    *("gradio", "fastapi", "uvicorn", "ray", "onnxruntime", "transformers"),
    *("asyncio", "ssl", "importlib.metadata", "multiprocessing"),
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


LLAMA = f"--llama-dir {ROOT}/tests/golden/LLaMA --llama-type TINY"
NO_FILE = "There is no file `nonsense`"
MISSING = {  # flags of a model -> what is said of it
    "--model nonsense": "`nonsense` is no model bundle",
    "--llama-dir nonsense --adapter x.pth": "The LLaMA folder `nonsense` does not exist",
    f"{LLAMA} --adapter nonsense": NO_FILE,
    f"{LLAMA} --adapter {PICTURE} --clip nonsense": NO_FILE,
}
ENCODERS = {  # likewise, of an encoder: with an adapter, no LLaMA is read
    "--model nonsense": MISSING["--model nonsense"],
    "--llama-dir nonsense --adapter nonsense": NO_FILE,
    f"--adapter {PICTURE} --clip nonsense": NO_FILE,
    "--llama-dir nonsense": "The LLaMA folder `nonsense` does not exist",
}
COMMANDS = {
    "caption PICTURE": MISSING,
    "generate --prompt a": MISSING | {"--llama-dir nonsense": "The LLaMA folder `nonsense` does not exist"},
    "bench": MISSING,
    "encode PICTURE --keys-values --out OUT": MISSING,
    "encode --text a --out OUT.npy": MISSING,
    "encode PICTURE --out OUT": ENCODERS,
    "export onnx --out OUT.onnx": ENCODERS,
}


def test_a_missing_part_of_a_model_is_refused_without_torch(tmp_path: Path) -> None:
    """Other faults of the same command, such as a device that is not there, are found with torch."""
    places = {f"OUT{suffix}": str(tmp_path / f"out{suffix}") for suffix in ("", ".npy", ".onnx")} | {"PICTURE": PICTURE}
    flags = ("", "--batch-size auto", "--device cuda", "--tensor-parallel 2")
    lines = [(f"caption PICTURE --model nonsense {words}", MISSING["--model nonsense"]) for words in flags]
    for command, models in COMMANDS.items():
        device = "" if command.startswith("export") else " --device cuda"
        lines += [(f"{command} {model}{device}", said) for model, said in models.items()]
    encoder = "caption PICTURE --model nonsense --encoder nonsense.onnx --device cuda"
    lines.append((encoder, "The encoder `nonsense.onnx` does not exist"))
    (tmp_path / "config.json").write_text("{}")
    lines.append((f"generate --prompt a --llama-dir {tmp_path}", "There is no tokenizer.model or tokenizer.json"))
    ran = run_several([places.get(word, word) for word in line.split()] for line, _ in lines)
    for (line, said), one in zip(lines, ran, strict=True):
        assert (one.code, one.out, said in one.told) == (1, "", True), (line, one)
    assert HEAVY & {*ran[-1].modules} <= ANSWERING | {"multiprocessing"}  # of commands that read in processes


def test_a_bundle_answers_without_torch_at_its_first_use_and_a_command_that_finds_all_answers_imports_no_model(
    tmp_path: Path,
) -> None:
    out, bundle = str(tmp_path / "answers.jsonl"), shutil.copytree(embedded_model(), tmp_path / "bundle")
    job = ["caption", PICTURE, "--model", str(bundle), "--out", out]
    assert imported(job, [*job, "--overwrite", "--precision", "int4", "--dtype", "bfloat16"]) <= ANSWERING

    imported([*job, "--overwrite"])
    assert imported(job) <= {"numpy", "importlib.metadata"}
    assert imported(["export-records", out, "--to", "csv", "--out", str(tmp_path / "answers.csv")]) <= {"numpy"}
