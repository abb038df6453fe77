"""`--config`, `config`, `completion`, parts of the help, and `load_settings`."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from llama_adapter import load_settings
from llama_adapter.app.jobs.records.manifest import read_manifest
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec
from llama_adapter.runtime.errors import UsageError
from tests.app.command import Run
from tests.app.golden import model_flags, picture


def test_the_manifest_of_a_run_runs_it_again(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    first = run("caption", picture(), model_flags(), "--max-new-tokens", "4", "--out", str(out), "--overwrite")
    manifest = f"{out}.manifest.json"

    again = run("caption", "--config", manifest)
    Path(out).unlink()
    without_records = run("caption", "--config", manifest)

    assert (first.code, again.code, without_records.code) == (0, 0, 0)
    assert "1 answered by an earlier run" in again.err
    (record,) = read_records(out)
    assert (record["picture"], record["tokens"]) == (picture(), 4)
    assert "overwrite" not in read_manifest(out)[-1].settings["output"]
    assert run("serve", "--config", manifest).code == 2


def test_config_show_says_where_settings_come_from_and_is_a_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMA_ADAPTER_TOP_K", "5")
    Path("run.yaml").write_text("command: ask\nprompt:\n  choices: ['yes', 'no']\n")

    shown = run("config", "show", "ask", "a b.png", "--seed", "3", "--config", "run.yaml")
    by_file = run("config", "show", "--config", "run.yaml", "--seed", "3")

    lines = {line.split(":")[0].strip(): line.partition(":")[2].strip() for line in shown.out.splitlines()}
    assert lines["pictures"] == '["a b.png"]  # PICTURES'
    assert lines["seed"] == "3  # --seed"
    assert lines["top_k"] == "5  # LLAMA_ADAPTER_TOP_K"
    assert lines["choices"] == '["yes", "no"]  # run.yaml:3'
    assert lines["temperature"] == "0.0  # default"
    assert lines["command"] == "ask"
    Path("again.yaml").write_text(shown.out)
    again = run("config", "show", "--config", "again.yaml").out
    assert yaml.safe_load(again) == yaml.safe_load(shown.out)
    values = yaml.safe_load(by_file.out)
    assert (shown.code, values["prompt"]["choices"], values["generation"]["seed"]) == (0, ["yes", "no"], 3)
    assert run("config", "show").out.startswith("command: caption")


def test_config_schema_prints_a_schema(run: Run) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(run("config", "schema").out))


def test_settings_for_python(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("generation: {max_new_tokens: 5}\ninput: {pictures: [a.png]}\ncomputation: {batch_size: 2}\n")

    run = load_settings(file, batch_size="auto", dtype=None, limit=3)

    assert run.spec == CaptionerSpec(batch_size="auto")
    assert run.of(InputSpec) == InputSpec(paths=("a.png",), limit=3)
    assert (run.sampling["max_new_tokens"], run["pictures"]) == (5, ["a.png"])
    with pytest.raises(KeyError):
        run["paths"]


@pytest.mark.parametrize(
    ("command", "overrides"),
    [("captoin", {}), ("caption", {"divice": "cpu"}), ("caption", {"seed": "x"}), ("caption", {"seed": object()})],
)
def test_settings_for_python_that_are_wrong(command: str, overrides: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        load_settings(command=command, **overrides)


def flags(text: str) -> set[str]:
    return {word.strip(",[]") for word in text.split() if word.strip("[").startswith("--")}


def test_help_shows_the_flags_of_the_first_day_and_the_others_by_group(run: Run) -> None:
    first, everything, model = (run("caption", "--help", *words).out for words in ([], ["all"], ["model"]))

    model_of_files = {"--llama-dir", "--adapter", "--clip"}
    assert {"--prompt", "--model", "--out", "--device", "--batch-size", "--config", *model_of_files} <= flags(first)
    assert len(flags(first)) < 16 < 40 < len(flags(everything))
    assert "--visual-heads" in flags(model)
    assert not flags(model) & {"--top-p", "--device"}
    assert "--no-recursive" not in flags(everything)
    assert run("--help", "caption").out == first
    shown = run("serve", "--help").out
    assert "batches:" not in shown, "all flags of this group are left out"
    assert "batches:" in run("serve", "--help", "server").out
    assert run("caption", "--help", "photos").code == run("--help", "captoin").code == 2


COMPLETE = """
source <("$PYTHON" -m llama_adapter completion bash)
complete_words() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMPREPLY=()
    "$(complete -p llama-adapter | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" llama-adapter "${!#}" "${@: -2:1}"
    echo "${COMPREPLY[@]}"
}
complete_words llama-adapter cap
complete_words llama-adapter export o
complete_words llama-adapter caption --batch
complete_words llama-adapter caption x.png --reader ""
complete_words llama-adapter caption photo
"""


def test_bash_completes_commands_flags_choices_and_files(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[4])}
    command = ["bash", "--norc", "-c", COMPLETE]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)

    assert ran.stdout.splitlines() == ["caption", "onnx om", "--batch-size", "process thread", "photo.jpg"]


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef llama-adapter"), ("fish", "complete -c llama-adapter")])
def test_completion_of_other_shells(run: Run, shell: str, mark: str) -> None:
    ran = run("completion", shell)

    assert (ran.code, mark in ran.out, "batch-size" in ran.out) == (0, True, True)
