"""The command line, called in this process: what it prints, where, and how it exits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from llama_adapter.app.cli import build_parser, main
from llama_adapter.app.doctor.environment import Probe
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.records.manifest import read_manifest
from llama_adapter.app.records.record import read_records
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import UsageError
from tests.app.command import Run
from tests.app.golden import CASES, ROOT, case_runs, model_flags, picture

SHORT = ["--max-new-tokens", "6"]


@pytest.fixture
def known_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` looks at the model alone: its table takes many processes, and has tests of its own."""
    monkeypatch.setattr(
        "llama_adapter.app.doctor.command.look_at_environment", lambda: [Probe(name="python", state="ok")]
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["caption", "--help"], 0),
        (["ask", "--help"], 0),
        (["convert", "--help"], 0),
        (["quantize", "--help"], 0),
        (["doctor", "--help"], 0),
        (["--version"], 0),
        ([], 2),
        (["paint"], 2),
        (["caption"], 2),
        (["caption", "x.png", "--top-p", "3"], 2),
        (["caption", "x.png", "--adapter", "x.pth"], 2),
    ],
)
def test_help_and_usage_errors_load_neither_torch_nor_numpy_nor_pillow(arguments: list[str], code: int) -> None:
    program = (
        "import sys; from llama_adapter.__main__ import main; code = main(sys.argv[1:]); "
        "print('loaded:', *{'torch', 'numpy', 'PIL', 'sentencepiece'} & sys.modules.keys(), file=sys.stderr); "
        "sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT)

    assert ran.stderr.splitlines()[-1] == "loaded:"
    assert ran.returncode == code
    assert (ran.stdout == "") == (code != 0)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["caption", "a.png", "--out", "x.jsonl", "b.png", "--quiet", "c d.png"], "paths"),
        (["ask", "--question", "Is it red?", "a.png", "b.png", "--choices", "yes,no", "c d.png"], "paths"),
        (["export-records", "a.png", "b.png", "--to", "csv", "c d.png"], "records"),
    ],
)
def test_names_may_stand_between_flags(arguments: list[str], names: str) -> None:
    assert vars(build_parser().parse_args(arguments))[names] == ["a.png", "b.png", "c d.png"]


def test_names_behind_two_dashes_may_begin_with_one_also_where_others_came_before_a_flag() -> None:
    options = build_parser().parse_args(["caption", "a.png", "--limit", "2", "b.png", "--", "-c.png", "--quiet"])

    assert (options.paths, options.quiet) == (["a.png", "b.png", "-c.png", "--quiet"], False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["caption", "a.png", "--blue", "b.png"],
        ["caption", "a.png", "--blue", "--", "b.png"],
        ["serve", "a.png"],
        ["bench", "3"],
    ],
)
def test_what_no_command_knows_is_no_name(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="unrecognized arguments"):
        build_parser().parse_args(arguments)


def test_defaults_are_those_of_the_dataclasses() -> None:
    options = vars(build_parser().parse_args(["caption", "x.png"]))
    sampling, spec = SamplingParams(), CaptionerSpec()

    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed"):
        assert options[name] == getattr(sampling, name)
    for name in spec.__slots__:
        assert options[name] == getattr(spec, name)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
@pytest.mark.parametrize("raw", [False, True], ids=["prompt", "raw-prompt"])
def test_golden_checkpoints_give_the_texts_of_the_reference(run: Run, case: dict[str, Any], raw: bool) -> None:
    for arguments, texts in case_runs(case, raw=raw):
        ran = run(arguments)

        pictures = arguments[-len(texts) :]
        assert ran.code == 0
        assert [ran.texts()[name] for name in pictures] == texts


def test_a_bad_picture_leaves_its_neighbours_answers_alone(run: Run, tmp_path: Path) -> None:
    good = [picture("shapes_200x300.jpg"), picture("noise_128x96.png"), picture("gradient_640x360.png")]
    empty, cut, missing = tmp_path / "empty.jpg", tmp_path / "cut.png", tmp_path / "missing.png"
    empty.touch()
    cut.write_bytes(Path(good[1]).read_bytes()[:2000])
    alone = run("caption", good, model_flags(), SHORT)

    mixed = run("caption", good[0], str(empty), good[1], str(cut), str(missing), good[2], model_flags(), SHORT)

    assert alone.code == 0
    assert mixed.code == 3
    codes = {record["picture"]: record["error"]["code"] for record in mixed.records if record["error"]}
    assert codes == {str(empty): "empty", str(cut): "truncated", str(missing): "missing"}
    assert {name: mixed.texts()[name] for name in good} == alone.texts()
    assert mixed.err.count("error: ") == 3


def test_a_run_of_bad_pictures_only_ends_with_3(run: Run) -> None:
    ran = run("caption", "missing.png", model_flags())

    assert ran.code == 3
    assert [record["finish"] for record in ran.records] == ["error"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence", "hint"),
    [
        (["--model", "nowhere"], 1, "`nowhere`", "convert"),
        (["--llama-dir", "nowhere", "--adapter", "a.pth"], 1, "`nowhere` does not exist", "--llama-dir"),
        ([*model_flags(), "--adapter", "nowhere.pth"], 1, "no file `nowhere.pth`", "doctor"),
        ([*model_flags(), "--clip", model_flags()[5]], 1, "is no CLIP", "swapped"),
        ([*model_flags(), "--visual-heads", "5"], 1, "5 heads do not divide", "--visual-heads"),
        ([*model_flags(), "--device", "abacus"], 2, "`abacus`; available: cpu", "--device"),
        ([*model_flags(), "--dtype", "int3"], 2, "dtype `int3`", "--dtype"),
        ([*model_flags(), "--context", "16"], 2, "tokens, the context holds 16", "--context"),
        ([*model_flags(), "--batch-size", "0"], 2, "wanted a whole number of at least 1, or auto, got '0'", ""),
        ([*model_flags(), "--max-new-tokens", "-1"], 2, "--max-new-tokens must be at least 0, got -1", ""),
        ([*model_flags(), "--input", "x"], 2, "--input needs --prompt", ""),
        ([*model_flags(), "--prompt", "x", "--raw-prompt", "y"], 2, "--prompt and --raw-prompt exclude each other", ""),
        (["--model", ""], 2, "--model is empty", ""),
        (["--visual-heads", "4"], 2, "--visual-heads go with --llama-dir, which is missing", ""),
        (["--model", "bundle", "--llama-type", "7B"], 2, "--llama-type, --adapter, --clip", ""),
        (["--model", "bundle", "--clip", "x.pt"], 2, "go with --llama-dir, which is missing", ""),
        (["--model", "bundle", *model_flags()], 2, "--model and --llama-dir exclude each other", ""),
        ([*model_flags(), "--prompt", "caf\udcc3\udca9"], 2, "encoding of this locale, utf-8", "LC_ALL=C.UTF-8"),
        (["--seed", "many"], 2, "invalid int value: 'many'", "--help"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(run: Run, arguments: list[str], code: int, sentence: str, hint: str) -> None:
    ran = run("caption", picture(), arguments)

    assert ran.code == code
    assert ran.out == ""
    first, *rest = ran.err.splitlines()
    assert first.startswith("error: ")
    assert sentence in first
    if hint:
        assert rest[0] == ""
        assert rest[1].startswith("hint: ")
        assert hint in rest[1]


def test_a_checkpoint_of_another_size_is_told_in_a_sentence(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "TINY"
    other.mkdir()
    source = Path(model_flags()[1]) / "TINY"
    for file in source.iterdir():
        os.symlink(file, other / file.name)
    (other / "params.json").unlink()
    params = json.loads((source / "params.json").read_text()) | {"n_layers": 7}
    (other / "params.json").write_text(json.dumps(params))
    os.symlink(source.parent / "tokenizer.model", tmp_path / "tokenizer.model")

    ran = run("caption", picture(), model_flags(), "--llama-dir", str(tmp_path))

    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert "7" in ran.err.splitlines()[0]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", picture(), "--model", "nowhere", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_choices_are_weighed_against_each_other(run: Run) -> None:
    ran = run("ask", picture(), "--question", "Is it red?", "--choices", "Yes, No", model_flags())

    (record,) = ran.records
    assert ran.code == 0
    assert set(record["choice"]) == {"Yes", "No"}
    assert sum(record["choice"].values()) == pytest.approx(1.0, abs=1e-5)
    assert record["text"] == max(record["choice"], key=record["choice"].get)
    assert record["finish"] == "choice"


@pytest.mark.parametrize("choices", ["Yes", "Yes,Yes", "Yes,,No", ""])
def test_unusable_choices_are_a_usage_error(run: Run, choices: str) -> None:
    ran = run("ask", picture(), "--question", "Is it red?", "--choices", choices, model_flags())

    assert ran.code == 2
    assert "two different answers" in ran.err


def test_text_format_has_a_line_for_each_picture(run: Run) -> None:
    pictures = [picture("shapes_200x300.jpg"), picture("rgba_180x140.png")]
    answers = run("caption", pictures, model_flags(), SHORT).texts()

    ran = run("caption", pictures, model_flags(), SHORT, "--format", "text")

    assert sorted(ran.out.splitlines()) == sorted(f"{name}: {text}" for name, text in answers.items())


def test_text_format_shows_the_probability_of_a_choice(run: Run) -> None:
    arguments = ["ask", picture(), "--question", "Is it red?", "--choices", "Yes,No", *model_flags()]
    (record,) = run(arguments).records

    ran = run(arguments, "--format", "text")

    assert ran.out == f"{picture()}: {record['text']} ({record['choice'][record['text']]:.2f})\n"


def test_out_keeps_the_records_and_stdout_stays_empty(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "answers.jsonl"
    piped = run("caption", picture(), "missing.png", model_flags(), SHORT)

    ran = run("caption", picture(), "missing.png", model_flags(), SHORT, "--out", str(out))

    assert ran.code == 3
    assert ran.out == ""
    assert "1 picture answered, 1 failed" in ran.err
    records = list(read_records(out))
    volatile = {"ms": None, "run": None}
    assert [record | volatile for record in records] == [record | volatile for record in piped.records]
    (manifest,) = read_manifest(out)
    assert manifest.counts == {"length": 1, "error": 1}
    assert manifest.ended_at is not None
    assert "auto" not in json.dumps(manifest.spec)


def test_a_second_run_answers_only_what_is_new(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    common = [*model_flags(), *SHORT, "--out", str(out)]
    first, second = picture("shapes_200x300.jpg"), picture("noise_128x96.png")
    run("caption", first, "missing.png", common)

    again = run("caption", first, second, "missing.png", "missing.png", common)
    other_question = run("caption", first, common, "--prompt", "What is this?")
    other_form = run("caption", first, common, "--raw-prompt", "What is this?")

    assert "1 picture answered, 1 failed, 1 answered by an earlier run, 1 failed in an earlier run" in again.err
    assert other_question.code == other_form.code == 0
    pictures = [record["picture"] for record in read_records(out)]
    assert sorted(pictures) == sorted([first, first, first, "missing.png", "missing.png", second])


def test_an_input_is_no_part_of_the_instruction(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    common = ["caption", picture(), *model_flags(), *SHORT, "--out", str(out)]
    run(common, "--prompt", "Is it\nred", "--input", "x")

    other_split = run(common, "--prompt", "Is it", "--input", "red\nx")
    whole = run(common, "--prompt", "Is it\nred\nx")
    same = run(common, "--prompt", "Is it\nred", "--input", "x")

    assert "earlier run" not in other_split.err + whole.err
    assert "1 answered by an earlier run" in same.err
    assert len({record["id"] for record in read_records(out)}) == 3


def test_a_copy_under_another_name_has_its_own_record(run: Run, tmp_path: Path) -> None:
    out, copy = tmp_path / "answers.jsonl", tmp_path / "copy.jpg"
    copy.write_bytes(Path(picture()).read_bytes())
    common = [*model_flags(), *SHORT, "--out", str(out)]
    run("caption", picture(), common)

    ran = run("caption", picture(), str(copy), common)

    assert ran.code == 0
    assert [record["picture"] for record in read_records(out)] == [picture(), str(copy)]


def test_a_file_that_holds_no_records_is_left_alone(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(out)
    before = out.read_bytes()

    ran = run("caption", picture(), model_flags(), "--out", str(out))

    assert ran.code == 1
    assert "is not a record" in ran.err
    assert out.read_bytes() == before


def test_a_place_that_cannot_be_written_is_told_in_a_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    ran = run("caption", picture(), model_flags(), "--out", str(tmp_path / "file" / "answers.jsonl"))

    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert "/file" in ran.err


@pytest.mark.parametrize("mistake", [["--model", "nowhere"], [*model_flags(), "--context", "16"]])
def test_a_failed_start_leaves_no_file_of_answers(run: Run, tmp_path: Path, mistake: list[str]) -> None:
    ran = run("caption", picture(), mistake, "--out", str(tmp_path / "answers.jsonl"))

    assert ran.code != 0
    assert list(tmp_path.iterdir()) == []


def test_quiet_keeps_the_errors_that_are_recorded_nowhere(run: Run) -> None:
    as_text = run("caption", "missing.png", model_flags(), "--quiet", "--format", "text")
    as_records = run("caption", "missing.png", model_flags(), "--quiet")

    assert as_text.err.startswith("error: ")
    assert as_text.out == as_records.err == ""
    assert as_records.records[0]["error"]["code"] == "missing"


def test_the_embedded_model_says_once_that_it_knows_drawings_only(run: Run) -> None:
    sample = str(next(sample_pictures().iterdir()))
    foreign = [picture("noise_128x96.png"), picture("gradient_640x360.png")]

    assert "drawn shapes" not in run("caption", sample, SHORT).err
    assert run("caption", sample, foreign, SHORT).err.count("drawn shapes") == 1
    assert run("caption", foreign, SHORT, "--quiet").err == ""
    assert "drawn shapes" not in run("caption", foreign, model_flags(), SHORT).err


def test_profile_prints_the_stages_on_stderr(run: Run) -> None:
    ran = run("caption", picture(), model_flags(), SHORT, "--profile", "--quiet")

    assert len(ran.records) == 1
    stages = [line.split()[0] for line in ran.err.splitlines()[1:8]]
    assert stages == ["read", "clip", "pre", "forward", "post", "decode", "write"]
    assert "bound by: " in ran.err


def test_profile_marks_do_not_wait_for_the_device(run: Run) -> None:
    ran = run("caption", picture(), model_flags(), SHORT, "--profile-marks", "--quiet")

    assert "the host's times, device not waited for" in ran.err
    assert run("caption", picture(), "--profile", "--profile-marks").code == 2


def test_a_seed_repeats_a_sampled_answer(run: Run) -> None:
    arguments = ["caption", picture(), *model_flags(), *SHORT, "--temperature", "3", "--top-p", "1"]

    assert run(arguments, "--seed", "5").texts() == run(arguments, "--seed", "5").texts()
    assert run(arguments, "--seed", "5").texts() != run(arguments, "--seed", "6").texts()


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
    assert run("doctor", "--model", bundle).code == 0


def test_convert_names_the_flags_it_lacks(run: Run, tmp_path: Path) -> None:
    ran = run("convert", "--out", str(tmp_path / "bundle"))

    assert ran.code == 2
    assert "--llama-dir and --adapter" in ran.err


def test_convert_names_the_dtypes_there_are(run: Run, tmp_path: Path) -> None:
    ran = run("convert", model_flags(), "--out", str(tmp_path / "bundle"), "--dtype", "int3")

    assert ran.code == 2
    assert "float16" in ran.err


@pytest.mark.usefixtures("known_environment")
def test_doctor_is_content_with_the_golden_checkpoints(run: Run) -> None:
    ran = run("doctor", model_flags())

    assert ran.code == 0
    assert "no errors in" in ran.out
    assert ran.out.splitlines()[1].split()[:2] == ["python", "ok"]  # the environment comes first


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", ""], "--model is empty"),
        (["--model", "bundle", *model_flags()], "--model and --llama-dir exclude each other"),
        (["--visual-heads", "4"], "--visual-heads go with --llama-dir, which is missing"),
        (["--adapter", "x.pth"], "go with --llama-dir, which is missing"),
        (["--llama-dir", "x"], "--llama-dir needs"),
        (["--device", "gpu"], "No kind of device named `gpu`"),
        (["--environment", "--device", "npu:x"], "No kind of device named `npu:x`"),
        (["--environment", "--model", "bundle"], "installation only, and --model goes with a model"),
        (["--environment", "--llama-dir", "x", "--adapter", "y"], "and --llama-dir, --adapter go with a model"),
        (["--environment", "--encoder", "clip.om"], "and --encoder goes with a model"),
        (["--encoder-device", "1"], "--encoder-device goes with --encoder, which is missing"),
        (["--encoder", "clip.onnx", "--encoder-device", "1"], "--encoder-device is 0 to 255 and goes with --vision om"),
        (["--encoder", "clip.onnx", "--vision", "torch"], "go with --vision onnx or om"),
    ],
)
def test_doctor_refuses_the_flags_that_caption_refuses(run: Run, arguments: list[str], sentence: str) -> None:
    ran = run("doctor", arguments)

    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


@pytest.mark.parametrize(
    "arguments",
    [["doctor", "--bananas"], ["doctor", "--model", ""], ["caption", "x.png", "y.png", "--z"], ["export", "om", "--z"]],
)
def test_usage_errors_point_at_the_help_of_their_own_command(run: Run, arguments: list[str]) -> None:
    words = " ".join(arguments[:2] if arguments[0] == "export" else arguments[:1])
    ran = run(arguments)

    assert ran.code == 2
    assert ran.err.endswith(f"hint: `llama-adapter {words} --help` lists what there is\n")


@pytest.mark.usefixtures("known_environment")
def test_doctor_says_that_files_are_swapped(run: Run) -> None:
    flags = model_flags()
    adapter, clip = flags[5], flags[7]

    ran = run("doctor", flags, "--adapter", clip, "--clip", adapter)

    assert ran.code == 1
    assert "swapped" in ran.out
    assert "hint: " in ran.out
    assert ran.out.splitlines()[-1].endswith(": adapter, clip, files")


def test_quantize_writes_a_bundle_and_records_tell_its_answers_from_those_of_floats(run: Run, tmp_path: Path) -> None:
    bundle, answers = str(tmp_path / "bundle"), str(tmp_path / "answers.jsonl")
    sample = str(next(sample_pictures().glob("*.png")))
    made = run("quantize", "--out", bundle)
    again = run("quantize", "--out", bundle)

    assert (made.code, made.out, again.code) == (0, "", 1)
    assert "MB in int8" in made.err
    for _ in range(2):  # what was answered in one precision is not asked again in it, and is in the other
        for precision in ("int8", "float"):
            assert run("caption", sample, "--model", bundle, "--out", answers, "--precision", precision).code == 0
    records = list(read_records(answers))
    assert len({record["id"] for record in records}) == len(records) == 2
    assert [run.spec["precision"] for run in read_manifest(answers)] == ["int8", "float", "int8", "float"]


def test_quantize_and_precision_know_two_kinds_of_numbers(run: Run, tmp_path: Path) -> None:
    unknown = run("quantize", "--out", str(tmp_path / "bundle"), "--precision", "int4")
    wrong = run("caption", picture(), "--precision", "int4")

    assert (unknown.code, wrong.code) == (2, 2)
    assert "invalid choice: 'int4'" in unknown.err
    assert "invalid choice: 'int4'" in wrong.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["caption", "a.png", "--recursiv"], "--recursive may be meant"),
        (["caption", "a.png", "--batch_size=4"], "--batch-size may be meant"),
        (["caption", "a.png", "--question", "What?"], "--prompt may be meant"),
        (["ask", "a.png", "--prompt", "What?"], "--question may be meant"),
        (["caption", "a.png", "--ouput", "x.jsonl"], "--out may be meant"),
        (["caption", "a.png", "-o", "x.jsonl"], "--out may be meant"),
        (["caption", "a.png", "--soup"], "hint: `llama-adapter caption --help`"),
    ],
)
def test_a_flag_that_is_nearly_one_of_ours_is_named(run: Run, arguments: list[str], meant: str) -> None:
    ran = run(*arguments)

    assert ran.code == 2
    assert meant in ran.err
    assert "llama-adapter" in ran.err


def test_help_shows_a_folder_job_and_what_is_made_of_it(run: Run) -> None:
    main, caption = run("--help"), run("caption", "--help")

    assert "--recursive --out captions.jsonl" in main.out
    assert main.out.index("export-records") < main.out.index("    convert ")
    assert caption.out.index("\noutput:") < caption.out.index("\nmodel:")


def test_a_current_folder_that_was_removed_is_told_before_anything_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    ran = run("caption", picture())

    assert (ran.code, "the one that this command was started in was removed" in ran.err) == (2, True)
    assert run("--help").code == 0
