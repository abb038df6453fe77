"""`demo_bsz.py`: the guide's variables, its result lines, and how it handles bad pictures."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

import demo_bsz
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.terminal.run_guarded import run_guarded
from tests.app.conftest import models_placed_once as models_placed_once
from tests.app.golden import GOLDEN, PICTURES, ROOT, case, picture

pytestmark = pytest.mark.usefixtures("models_placed_once")

VARIABLES = {
    "DEVICE_ID": "0",
    "IMG_SIZE": "224",
    "BATCH_SIZE": "4",
    "INFER_LOOP": "",
    "DTYPE": "",
    "LLAMA_DIR": str(GOLDEN / "LLaMA"),
    "CLIP_DIR": str(GOLDEN / "CLIP"),
    "BIAS_DIR": str(GOLDEN / "adapters" / "BIAS-TINY.pth"),
    "PIC_FILE_PATH": str(PICTURES),
}
FLAGS = ["--llama-type", "TINY", "--visual-heads", "4", "--max-new-tokens", "16"]
PROMPT = ["--prompt", "Describe the image."]
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white", "gray", "pink", "brown")


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def results(self) -> dict[str, str]:
        lines = re.findall(r"^\[result\]: (.*?): (.*)$", self.out, re.MULTILINE)
        return {Path(name).name: text for name, text in lines}

    def ms(self, what: str) -> float:
        return sum(map(float, re.findall(rf"^\[{what}\]: ([\d.]+) ms$", self.out, re.MULTILINE)))


Demo = Callable[..., Ran]


@pytest.fixture(autouse=True)
def threads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read pictures in this process, because a pool of processes takes longer to start than the rest of a run."""
    place, plain = "llama_adapter.app.pictures.reading.isolated.open_reader", open_reader
    monkeypatch.setattr(place, lambda kind, *given, **options: plain("thread", *given, **options))


@pytest.fixture
def embedded_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    """The demo with no other variables than those that are given."""

    def demo(*flags: str, **variables: str) -> Ran:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["demo_bsz.py", *flags])
        return Ran(run_guarded(demo_bsz.main), *capsys.readouterr())

    return demo


@pytest.fixture
def demo(embedded_demo: Demo) -> Demo:
    """The demo with the golden checkpoints."""

    def demo(*flags: str, **variables: str) -> Ran:
        asked = [] if "--question" in flags else PROMPT
        return embedded_demo(*FLAGS, *asked, *flags, **VARIABLES | variables)

    return demo


def test_every_picture_has_its_result_and_times_are_given_by_trial_and_by_stage(demo: Demo) -> None:
    ran = demo("--trials", "2")

    assert ran.code == 0
    assert len(ran.results) == 9  # two batches of 4, and one picture
    for name, text in zip(case("bias_b3_equal")["images"], case("bias_b3_equal")["output_text"], strict=True):
        assert ran.results[name] == text
    assert len(re.findall(r"^\[trial time\]: [\d.]+ ms$", ran.out, re.MULTILINE)) == 2
    assert ran.ms("avg_time") == pytest.approx(ran.ms("trial time") / 2 / 3, abs=0.1)
    stages = re.findall(r"^(\w+) +[\d.]+ +[\d.]+% +[\d.]+$", ran.out, re.MULTILINE)
    assert stages == ["read", "clip", "pre", "forward", "post", "decode", "write", "total"]
    assert "18 pictures in" in ran.out
    assert "pictures/s" in ran.out
    assert "warm-up 4 pictures" in ran.out


def test_a_bad_picture_is_reported_and_the_others_answered(demo: Demo, known_pictures: Path) -> None:
    shutil.copy(picture(), known_pictures / "whatever name.jpeg")
    (known_pictures / "a-broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")

    ran = demo("--infer-loop", "1", INFER_LOOP="7", PIC_FILE_PATH=str(known_pictures))

    assert ran.code == 3
    assert "\n2 pictures" in ran.out  # a flag takes precedence over its variable
    assert ran.results["whatever name.jpeg"] == case("bias_b1")["output_text"][0]
    assert ran.results["a-broken.jpg"].startswith("error: ")
    assert "exactly right" not in ran.out  # known answers are for the embedded model
    assert "knows drawings" not in ran.err


def test_answers_are_as_long_as_those_of_other_commands_by_default() -> None:
    assert demo_bsz.parser().parse_args([]).max_new_tokens == SamplingParams.max_new_tokens


def test_variables_and_flags_take_precedence_over_a_file(demo: Demo, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("computation: {batch_size: 2}\ngeneration: {max_new_tokens: 1}\nprofiling: {infer_loop: 1}\n")

    ran = demo("--config", str(file))

    assert ran.code == 0
    assert "\n4 pictures" in ran.out  # a single batch, as in the file, with the size from BATCH_SIZE
    assert ran.results == demo(INFER_LOOP="1").results  # with --max-new-tokens 16 from the command line
    file.write_text("input: {recursive: true}\n")
    assert demo("--config", str(file)).code == 2


@pytest.mark.parametrize(
    ("variables", "code", "sentence"),
    [
        ({"IMG_SIZE": "336"}, 2, "IMG_SIZE must be 224"),
        ({"IMG_SIZE": "wide"}, 2, "IMG_SIZE: wanted a whole number, got 'wide'"),
        ({"INFER_LOOP": "0"}, 2, "INFER_LOOP must be at least 1"),
        ({"DTYPE": "float8"}, 2, "cannot compute in dtype `float8`"),
        ({"BATCH_SIZE": "0"}, 2, "BATCH_SIZE must be a whole number of at least 1"),
        ({"LLAMA_DIR": ""}, 2, "BIAS_DIR, CLIP_DIR and --visual-heads go with LLAMA_DIR, which is missing"),
        ({"BIAS_DIR": ""}, 2, "LLAMA_DIR needs"),
        ({"BIAS_DIR": str(GOLDEN / "adapters")}, 2, "must hold exactly one .pth file"),
        ({"CLIP_DIR": str(GOLDEN / "images")}, 2, "must hold exactly one .om or .onnx or .pt or .safetensors file"),
        ({"LLAMA_DIR": "nowhere"}, 1, "`nowhere` does not exist"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(demo: Demo, variables: dict[str, str], code: int, sentence: str) -> None:
    ran = demo(**variables)

    assert ran.code == code
    assert ran.out == ""
    [told] = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert sentence in told


def test_infer_loop_is_the_number_of_batches_and_starts_again_after_the_last_picture(demo: Demo) -> None:
    few, many = demo(INFER_LOOP="2"), demo(INFER_LOOP="5")

    assert len(few.results) == 8  # out of 9 pictures
    assert "\n8 pictures in" in few.out
    assert few.ms("avg_time") == pytest.approx(few.ms("trial time") / 2, abs=0.1)
    assert many.out.count("[result]") == len(many.results) == 9
    assert "\n17 pictures in" in many.out  # batches of 4, 4, 1, 4, 4
    assert many.ms("avg_time") == pytest.approx(many.ms("trial time") / 5, abs=0.1)


def test_dtype_is_a_variable_what_was_chosen_is_told_and_an_empty_variable_counts_as_not_set(demo: Demo) -> None:
    usual = demo(DEVICE_ID="", IMG_SIZE="", BATCH_SIZE="", INFER_LOOP="", PIC_FILE_PATH=picture())
    half = demo(PIC_FILE_PATH=picture(), DTYPE="bfloat16")

    assert usual.code == 0
    assert usual.out.count("[trial time]") == 1
    assert "batch size 5" in usual.out
    assert "note: computing on cpu in float32: no accelerator is installed; the model is small" in usual.err
    assert "cpu, float32, eager" in usual.out
    assert "cpu, bfloat16, eager" in half.out


def test_the_number_of_an_accelerator_that_is_not_there_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def numbered(kind: str | None, number: int) -> tuple[str, str]:
        monkeypatch.setattr("llama_adapter.runtime.devices.accelerator_kind", lambda: kind)
        return demo_bsz.numbered_device(number), capsys.readouterr().err

    assert numbered(None, 0) == numbered("meta", 0) == ("auto", "")
    assert numbered("meta", 3) == ("meta:3", "")
    note = "note: DEVICE_ID is 3, but there is no accelerator for the decoder: the CPU computes\n"
    assert numbered(None, 3) == ("cpu", note)


def test_neither_a_name_nor_an_answer_acts_on_the_terminal(demo: Demo, tmp_path: Path) -> None:
    for name in (b"a\xff.png", b"b\x1b[31m\a\n.png", "ünï.png".encode()):
        shutil.copy(picture("noise_128x96.png"), tmp_path / os.fsdecode(name))

    ran = demo("--question", "Is it red?", "--choices", "Yes\x1b[31m,No\x1b[31m", PIC_FILE_PATH=str(tmp_path))

    assert ran.code == 0
    assert set(ran.results.values()) <= {"Yes [31m", "No [31m"}
    assert set(ran.results) == {r"a\xff.png", r"b\x1b[31m\x07\n.png", "ünï.png"}
    assert ran.out.replace("\n", "").isprintable()


def test_the_only_model_of_a_folder_is_meant_and_7b_among_several(tmp_path: Path) -> None:
    (tmp_path / "13B").mkdir()
    (tmp_path / "13B" / "params.json").touch()
    assert demo_bsz.llama_type(str(tmp_path)) == "13B"

    (tmp_path / "7B").mkdir()
    (tmp_path / "7B" / "params.json").touch()
    assert demo_bsz.llama_type(str(tmp_path)) == "7B"

    for name in ("config.json", "manifest.json"):  # a Hugging Face folder and a bundle are models themselves
        (tmp_path / name).touch()
        assert demo_bsz.llama_type(str(tmp_path)) is None
        (tmp_path / name).unlink()


@pytest.mark.slow
@pytest.mark.proves("embedded model", "CPU")
@pytest.mark.proves("demo_bsz.py", "CPU")
def test_without_any_variable_the_embedded_model_captions_the_sample_pictures() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}

    ran = subprocess.run([sys.executable, "demo_bsz.py"], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("[result]: ") == len(list((ROOT / "assets/pictures").glob("*.[pj][np]g")))
    assert "error" not in ran.stdout
    times, score = ran.stdout.split("\n\ntask ")
    assert "pictures/s" in times
    known = (ROOT / "assets/pictures/questions.jsonl").read_text().splitlines()
    marks = re.findall(r"^(\w+) +(\d+) +(\d+)$", score, re.MULTILINE)
    assert [task for task, _, _ in marks] == list(dict.fromkeys(json.loads(line)["task"] for line in known))
    assert sum(int(asked) for _, asked, _ in marks) == len(known)
    assert sum(int(right) for _, _, right in marks) >= 0.95 * len(known)
    assert re.search(rf"^\d+ of {len(known)} answers exactly right, in [\d.]+ s$", score, re.MULTILINE)


@pytest.fixture
def known_pictures(tmp_path: Path) -> Path:
    """A folder with a sample picture and two questions about it, one of which has a wrong expected answer."""
    shutil.copy(ROOT / "assets/pictures/12-red-star.jpg", tmp_path)
    asked = {"picture": "12-red-star.jpg", "task": "look"}
    answers = {"What color is the star?": "red", "What shape is the red object?": "moon\x1b[31m"}
    lines = [json.dumps({**asked, "question": question, "answer": answer}) for question, answer in answers.items()]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_at_most_twenty_wrong_answers_are_shown(embedded_demo: Demo, known_pictures: Path) -> None:
    (known_pictures / "stars").mkdir()
    shutil.copy(known_pictures / "12-red-star.jpg", known_pictures / "stars" / "red.jpg")
    asked = [f"Is there a {size} {color} star?" for size in ("small", "large") for color in COLORS]
    lines = [json.dumps({"picture": "stars/red.jpg", "question": question, "answer": "perhaps"}) for question in asked]
    (known_pictures / "questions.jsonl").write_text("\n".join(lines))

    ran = embedded_demo("--pic-file-path", str(known_pictures), "--max-new-tokens", "1")

    assert re.search(rf"^- +{len(asked)} +0$", ran.out, re.MULTILINE)  # the file names no tasks
    wrong = re.findall(r"^wrong: (.*) wanted `perhaps`, got `(?:yes|no)` \(stars/red\.jpg\)$", ran.out, re.MULTILINE)
    assert wrong == asked[:20]
    assert f"\nand {len(asked) - 20} more wrong\n0 of {len(asked)} answers exactly right, in " in ran.out


@pytest.mark.parametrize(("is_damaged", "right", "answered", "unread"), [(False, 1, 2, 1), (True, 0, 0, 3)])
def test_what_is_known_of_the_pictures_is_asked_at_the_end_and_of_unreadable_ones_counted(
    embedded_demo: Demo, known_pictures: Path, is_damaged: bool, right: int, answered: int, unread: int
) -> None:
    missing = {"picture": "missing.jpg", "task": "look", "question": "Is there a star?", "answer": "yes"}
    with open(known_pictures / "questions.jsonl", "a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(missing)}\n")
    if is_damaged:
        (known_pictures / "12-red-star.jpg").write_text("no picture")

    ran = embedded_demo("--pic-file-path", str(known_pictures), "--max-new-tokens", "1")

    assert ran.code == (3 if is_damaged else 0)  # a wrong answer is not a failure
    times, score = ran.out.split("\n\ntask ")
    assert "pictures/s" in times
    wrong = "wrong: What shape is the red object? wanted `moon\\x1b[31m`, got `star` (12-red-star.jpg)\n"
    assert (bool(re.search(r"^look +2 +1$", score, re.MULTILINE)), wrong in score) == (not is_damaged, not is_damaged)
    counts = f"questions about pictures that cannot be read: {unread}\n{right} of {answered} answers exactly right, in "
    assert counts in score
    assert "not scored" not in ran.err


FAULTY = {
    '{"picture": "12-red-star.jpg"': "Wanted labelled data without errors, got 1:\n  FOLDER/questions.jsonl, line 1: ",
    '{"picture": "12-red-star.jpg", "question": "{word}?", "answer": "x"}': "The prompt wants the variable {word}",
}  # key: content of the file; value: the reason that is given


@pytest.mark.parametrize("flags", [["--no-score"], []])
@pytest.mark.parametrize(("content", "reason"), FAULTY.items(), ids=["no JSON", "unknown variable"])
def test_nothing_is_asked_with_no_score_or_of_a_faulty_file(
    embedded_demo: Demo, known_pictures: Path, content: str, reason: str, flags: list[str]
) -> None:
    (known_pictures / "questions.jsonl").write_text(content)

    ran = embedded_demo("--pic-file-path", str(known_pictures), *flags)

    assert ran.code == 0
    assert "pictures/s" in ran.out
    assert "exactly right" not in ran.out
    assert "knows drawings of one to three plain shapes and nothing else" in ran.err
    note = f"note: not scored. {reason}".replace("FOLDER", str(known_pictures))
    assert (note in ran.err) == (not flags)
    assert ("not scored" in ran.err) == (not flags)


def test_a_file_of_known_answers_that_cannot_be_opened_is_noted(
    known_pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*paths: str, **options: bool) -> None:
        raise PermissionError(13, "Permission denied", "questions.jsonl")

    monkeypatch.setattr("llama_adapter.app.learning.labelled.reading.read_examples", refused)
    demo_bsz.print_score(mock.Mock(), known_pictures / "questions.jsonl")

    reason = "note: not scored. Permission denied: `questions.jsonl`"
    assert capsys.readouterr() == ("", f"{reason}\n  hint: check the path, its permissions and the disk\n")


def test_a_name_that_is_too_long_is_a_picture_that_is_missing(embedded_demo: Demo) -> None:
    ran = embedded_demo("--pic-file-path", "x" * 300)

    assert ran.code == 3
    assert "is too long" in ran.out
