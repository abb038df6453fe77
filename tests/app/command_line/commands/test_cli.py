"""The command line, called in this process: its output, where it is printed, and exit codes."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.command_line.main import build_parser, main
from llama_adapter.app.jobs.records.manifest import read_manifest
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.models.resources import sample_pictures
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


def test_usage_errors(run: Run, snapshot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    serve = "llama_adapter.app.command_line.commands.run_server.run_serve"
    monkeypatch.setattr(serve, lambda job, **_: 0)  # a mistake that is not found must not serve for ever
    flags = model_flags()
    paths = {"LLAMA": flags[1], "ADAPTER": flags[5], "CLIP": flags[7], "PICTURE": picture()}
    told = {}
    mistakes = Path(__file__).with_name("mistakes.txt").read_text(encoding="ascii", errors="surrogateescape")
    for line in mistakes.replace("MODEL", MODEL).splitlines():
        ran = run(*(paths.get(word, word) for word in shlex.split(line)))
        assert ran.out == ""
        message = ran.told
        for name, path in paths.items():
            message = message.replace(path, name)
        message = re.sub(r"available: .*? hint", "available: ... hint", message)  # this machine's devices
        told[line.encode("utf-8", "backslashreplace").decode()] = f"{ran.code}: {message}"

    assert told == snapshot
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
