"""The command line, called in this process: output, exit codes, help, `config`, `completion`, and `load_settings`."""

import json
import pickle
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from llama_adapter import load_settings
from llama_adapter.app.command_line.main import build_parser, main
from llama_adapter.app.jobs.records.manifest import read_manifest
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec
from llama_adapter.runtime.errors import DeviceError, UsageError
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.settings.shown import format_settings
from tests.app.command import Run
from tests.app.golden import case, case_runs, model_flags, picture

pytestmark = pytest.mark.usefixtures("models_placed_once")

SHORT = ["--max-new-tokens", "6"]


@pytest.mark.parametrize("arguments", [[], ["export"]])
def test_command_without_its_sub_command_prints_its_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err

    assert main([*arguments, "--help"]) == 0
    assert printed == capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["caption", "a.png", "--out", "x.jsonl", "b.png", "--quiet", "c d.png"], "paths"),
        (["ask", "--question", "Is it red?", "a.png", "b.png", "--choices", "yes,no", "c d.png"], "paths"),
        (["export-records", "a.png", "b.png", "--to", "csv", "c d.png"], "records"),
    ],
)
def test_names_may_stand_between_flags_and_begin_with_a_dash_behind_two(arguments: list[str], names: str) -> None:
    assert vars(build_parser().parse_args(arguments))[names] == ["a.png", "b.png", "c d.png"]
    options = vars(build_parser().parse_args([*arguments, "--", "-e.png", "--debug"]))
    assert (options[names][3:], options["debug"]) == (["-e.png", "--debug"], False)


def test_a_file_like_a_flag_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-1.png").touch()
    for name, is_advised in {"-1.png": True, "-2.png": False, "-" + "x" * 300: False}.items():
        with pytest.raises(UsageError, match=f"unrecognized arguments: {name}") as refused:
            build_parser().parse_args(["caption", "a.png", name])
        assert ("come after `--`" in refused.value.hint) is is_advised


@pytest.mark.parametrize(("name", "raw"), [("lora_b3_mixed", False), ("bias_b1_input", False), ("bias_limit72", True)])
def test_golden_checkpoints_give_the_texts_of_the_reference(run: Run, name: str, raw: bool) -> None:
    for arguments, texts in case_runs(case(name), raw=raw):
        ran = run(arguments)

        pictures = arguments[-len(texts) :]
        assert ran.code == 0
        assert [ran.texts()[name] for name in pictures] == texts


MODEL = "--llama-dir LLAMA --llama-type TINY --adapter ADAPTER --clip CLIP --visual-heads 4"


def test_usage_errors(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """mistakes.txt has a command in each line, and what is said of it."""
    monkeypatch.chdir(tmp_path)
    serve = "llama_adapter.app.command_line.commands.run_server.run_serve"
    monkeypatch.setattr(serve, lambda job, **_: 0)  # a mistake that is not found must not serve for ever
    flags = model_flags()
    paths = {"LLAMA": flags[1], "ADAPTER": flags[5], "CLIP": flags[7], "PICTURE": picture()}
    file, told = Path(__file__).with_name("mistakes.txt"), ""
    mistakes = file.read_text(encoding="ascii", errors="surrogateescape")
    assert len(mistakes.splitlines()) > 100
    for command in (line.partition(" => ")[0] for line in mistakes.splitlines()):
        ran = run(*(paths.get(word, word) for word in shlex.split(command.replace("MODEL", MODEL))))
        assert ran.out == ""
        message = ran.told
        for name, path in paths.items():
            message = message.replace(path, name)
        message = re.sub(r"available: .*? hint", "available: ... hint", message)  # this machine's devices
        told += f"{command} => {ran.code}: {message}\n"

    if request.config.option.update_snapshots:
        file.write_text(told, encoding="ascii", errors="surrogateescape")
    else:
        assert told == mistakes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags", [["--warmup", "0.1", "--force"], ["--llama-dir", "llama", "--clip", "clip.pt", "--num-queries", "4"]]
)
def test_the_settings_of_a_training_start_it_again_and_replace_nothing(
    flags: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[TrainJob] = []
    monkeypatch.setattr("llama_adapter.app.learning.training.run.train", lambda job: jobs.append(job) or 0)
    assert run("train", "photos", "--out", "a.pth", *flags).code == 0
    (tmp_path / "settings.yaml").write_text(format_settings(jobs[0].settings))
    ran = run("train", "--config", str(tmp_path / "settings.yaml"))

    assert ran.code == 0, ran.err
    assert replace(jobs[1], settings={}) == replace(jobs[0], settings={}, force=False)


def test_a_size_of_a_new_adapter_is_refused_for_another_one_wherever_it_is_set(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.app.learning.training.run.train", lambda job: pytest.fail("it is trained"))
    (file := tmp_path / "settings.yaml").write_text("training:\n  num_queries: 4\n")
    monkeypatch.setenv("LLAMA_ADAPTER_VISUAL_WIDTH", "64")

    ran = run("train", "photos", "--out", "a.pth", "--config", str(file), "--adapter-layers", "2")
    names = f"num_queries ({file}:2), --adapter-layers, LLAMA_ADAPTER_VISUAL_WIDTH"
    assert (ran.code, f"only a new adapter takes a size: {names}\n" in ran.err) == (2, True), ran.err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", picture(), "--model", "nowhere", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_out_keeps_the_records_and_stdout_stays_empty(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "answers.jsonl"
    piped = run("caption", picture(), "missing.png", model_flags(), SHORT)

    ran = run("caption", picture(), "missing.png", model_flags(), SHORT, "--out", str(out))

    assert ran.code == 3
    assert ran.out == ""
    assert "1 picture answered, 1 failed" in ran.err
    assert f"`{out}`" in ran.err
    records = list(read_records(out))
    volatile = {"ms": None, "run": None}
    assert [record | volatile for record in records] == [record | volatile for record in piped.records]
    (manifest,) = read_manifest(out)
    assert manifest.counts == {"length": 1, "error": 1}
    assert manifest.ended_at is not None
    assert "auto" not in manifest.spec.values()


def test_quiet_keeps_the_errors_that_are_recorded_nowhere(run: Run) -> None:
    as_text = run("caption", "missing.png", model_flags(), "--quiet", "--format", "text")
    as_records = run("caption", "missing.png", model_flags(), "--quiet")

    assert as_text.err.startswith("error: ")
    assert as_text.out == as_records.err == ""
    assert as_text.code == as_records.code == 3
    assert [(one["finish"], one["error"]["code"]) for one in as_records.records] == [("error", "missing")]


def test_the_embedded_model_says_once_that_it_knows_drawings_only(run: Run) -> None:
    sample = str(next(sample_pictures().iterdir()))
    foreign = [picture("noise_128x96.png"), picture("gradient_640x360.png")]

    assert "drawn shapes" not in run("caption", sample, SHORT).err
    assert run("caption", sample, foreign, SHORT).err.count("drawn shapes") == 1
    assert run("caption", foreign, SHORT, "--quiet").err == ""
    assert "drawn shapes" not in run("caption", foreign, model_flags(), SHORT).err


def test_profile_prints_the_stages_on_stderr_and_marks_do_not_wait_for_the_device(run: Run) -> None:
    ran = run("caption", picture(), model_flags(), SHORT, "--profile", "--quiet")

    assert len(ran.records) == 1
    stages = [line.split()[0] for line in ran.err.splitlines()[1:8]]
    assert stages == ["read", "clip", "pre", "forward", "post", "decode", "write"]
    assert "bound by: " in ran.err
    marked = run("caption", picture(), model_flags(), SHORT, "--profile-marks", "--quiet")
    assert "the host's times, device not waited for" in marked.err
    assert run("caption", picture(), "--profile", "--profile-marks").code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("known_environment")
def test_convert_writes_a_bundle_that_answers_as_its_sources(run: Run, tmp_path: Path) -> None:
    bundle = str(tmp_path / "bundle")
    made = run("convert", model_flags(), "--out", bundle, "--dtype", "float32")
    again = run("convert", model_flags(), "--out", bundle, "--dtype", "float32")
    forced = run("convert", model_flags(), "--out", bundle, "--dtype", "float32", "--force")

    assert (made.code, again.code, forced.code) == (0, 1, 0)
    assert made.out == ""
    from_bundle = run("caption", picture(), "--model", bundle, SHORT)
    assert from_bundle.texts() == run("caption", picture(), model_flags(), SHORT).texts()
    checked = run("doctor", "--model", bundle)
    assert (checked.code, "no errors in" in checked.out) == (0, True)
    known = json.loads(Path(bundle, "known_answer.json").read_text())
    assert repr(known["text"]) in forced.err


def test_convert_without_a_known_answer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks_memory(place: Path) -> str:
        raise DeviceError("the model needs 27 GB")

    unasked = run("convert", model_flags(), "--out", str(tmp_path / "a"), "--no-known-answer")
    monkeypatch.setattr("llama_adapter.app.command_line.doctor.model.write_known_answer", lacks_memory)
    failed = run("convert", model_flags(), "--out", str(tmp_path / "b"))

    assert (unasked.code, failed.code) == (0, 0)
    assert "known answer" not in unasked.err
    assert "the model needs 27 GB" in failed.err
    assert not list(tmp_path.glob("*/known_answer*"))


def test_quantize_writes_a_bundle_and_records_tell_its_answers_from_those_of_floats(run: Run, tmp_path: Path) -> None:
    bundle, answers = str(tmp_path / "bundle"), str(tmp_path / "answers.jsonl")
    sample = str(next(sample_pictures().glob("*.png")))
    made = run("quantize", "--out", bundle)
    again = run("quantize", "--out", bundle)

    assert (made.code, made.out, again.code) == (0, "", 1)
    assert "MB in int8" in made.err
    split = run("convert", "--model", bundle, "--out", str(tmp_path / "split"))
    assert (split.code, "--tensor-parallel is missing" in split.err) == (2, True)
    for _ in range(2):  # the second time, the answers of this precision are reused
        for precision in ("int8", "float"):
            assert run("caption", sample, "--model", bundle, "--out", answers, "--precision", precision).code == 0
    records = list(read_records(answers))
    assert len({record["id"] for record in records}) == len(records) == 2
    assert [run.spec["precision"] for run in read_manifest(answers)] == ["int8", "float", "int8", "float"]


def test_help_shows_a_folder_job_and_what_is_made_of_it(run: Run) -> None:
    main, caption = run("--help"), run("caption", "--help")

    assert "--recursive --out captions.jsonl" in main.out
    assert main.out.index("export-records") < main.out.index("    convert ")
    assert caption.out.index("\noutput:") < caption.out.index("\nmodel:")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_prose_of_help_fits_the_terminal_and_no_flag_is_broken(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = build_parser()
    texts = [command.format_help("all") for command in parser.commands().values()]
    lines = "\n".join([parser.format_help(), *texts]).splitlines()
    prose = [line for line in lines if line and not line.startswith((" ", "usage:"))]

    assert len(prose) > 100
    assert not [line for line in prose if len(line) > min(columns, 120)]
    assert not [line for line in lines if line.endswith("-") and "--" in line]


def test_help_fills_paragraphs_and_keeps_lines_that_begin_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    _, *found = build_parser().commands()["pack"].format_help().split("\n\n")

    assert found[0].splitlines() == [
        "Store the weights of a bundle in the layout that the",
        "kernels of this processor use. Such a bundle is mapped",
        "into memory and used as it is: it starts in seconds, and",
        "processes share its memory. Other processors and devices",
        "take it too, but convert the layout at every start; the",
        "values are the same. `doctor --model` shows the layout.",
    ]
    assert found[1].splitlines()[1] == "  llama-adapter pack --model BUNDLE --precision int4 --out BUNDLE-int4-packed"


def test_removed_current_folder_is_a_usage_error(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    ran = run("caption", picture())

    assert (ran.code, "the one that this command was started in was removed" in ran.err) == (2, True)
    assert run("--help").code == 0


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("train DATA --out", marks=pytest.mark.slow),
        "eval DATA --out",
        "convert --llama-dir LLAMA --adapter ADAPTER --out",
        "convert --model BUNDLE --tensor-parallel 2 --out",
        "quantize --out",
        "pack --out",
        "export onnx --out",
        "export decoder --out",
        "ask --calibrate DATA --choices a,b --calibration-out",
    ],
)
def test_a_second_run_with_the_same_out_is_refused_before_it_reads_anything(
    command: str, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out.pth"
    with locked_output(out):
        ran = run(*command.split(), str(out))
    assert ran.code == 1
    assert f"Another run is writing `{out}`" in ran.err
    assert "name another --out" in ran.err
    assert list(tmp_path.iterdir()) == []


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
    for command in build_parser().commands():  # a pool of processes pickles what each of them receives
        settings = load_settings(command=command)
        assert pickle.loads(pickle.dumps(settings)).to_yaml() == settings.to_yaml()


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
