"""Jobs over many pictures: inputs, questions, and later runs of the same job."""

import dataclasses
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.questions import count_answers
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.manifest import manifest_path, read_manifest
from llama_adapter.app.jobs.records.record import Record, read_records
from llama_adapter.app.jobs.result_writer import ResultWriter, how_to_go_on
from llama_adapter.app.jobs.runner import LocalRunner
from llama_adapter.app.models.bundle import add_familiarity, convert, load_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec
from scripts.train_embedded.familiar import fit_queries
from tests.app.command import Ran, Run
from tests.app.golden import NAMES, model_flags, model_options, picture

pytestmark = pytest.mark.usefixtures("models_placed_once")

COMMON = [*model_flags(), "--max-new-tokens", "4"]
REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


@dataclasses.dataclass(frozen=True)
class Caption:
    """The command `caption` about the three pictures of `folder`, or other inputs, with records in the file `out`."""

    run: Run
    folder: Path
    out: Path

    def __call__(self, *flags: str) -> Ran:
        return self.of(self.folder, *flags)

    def of(self, *inputs: str | Path) -> Ran:
        return self.run("caption", *map(str, inputs), *COMMON, "--out", str(self.out))

    def export(self) -> Ran:
        return self.run("export-records", str(self.out), "--to", "jsonl")

    @property
    def records(self) -> list[Record]:
        return list(read_records(self.out))


@pytest.fixture
def caption(run: Run, folder: Path, out: Path) -> Caption:
    return Caption(run, folder, out)


def after_each_answer(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    write = ResultWriter.write
    monkeypatch.setattr(ResultWriter, "write", lambda writer, answer: (write(writer, answer), act()))


def test_records_have_the_token_ids_on_request(run: Run, folder: Path, caption: Caption) -> None:
    with Captioner.load(**model_options()) as captioner:
        expected = [list(answer.token_ids) for answer in captioner.generate(folder, max_new_tokens=4)]

    plain = run("caption", str(folder), COMMON).records
    asked = caption("--output-ids", "--format", "jsonl").records
    again = caption()

    assert sorted(record["output_ids"] for record in asked) == sorted(expected)
    fields = {record["id"]: record.keys() for record in plain}
    assert {record["id"]: record.keys() - {"output_ids"} for record in asked} == fields
    assert "3 answered by an earlier run" in again.err


# Sources of pictures


@pytest.mark.parametrize(("command", "flags", "told"), REFUSED)
def test_flags_that_do_not_fit_are_a_usage_error_before_the_model_is_loaded(
    command: str, flags: list[str], told: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    ran = run(command, *flags, "--model", "nowhere")

    assert (ran.code, told in ran.err, "nowhere" in ran.err) == (2, True, False)
    assert list(tmp_path.iterdir()) == []


def test_pictures_left_out_in_sub_folders_are_told(run: Run, folder: Path) -> None:
    below = folder / "sub" / "deep"
    below.mkdir(parents=True)
    for name in NAMES[:2]:
        shutil.copy(picture(name), below / name)

    flat = run("caption", str(folder), COMMON)

    assert flat.code == 0
    assert f"2 pictures were left out in sub-folders of `{folder}`; --recursive includes them" in flat.err
    for complete in ([str(folder), "--recursive"], [str(folder / "*.???")], [str(folder), str(below)]):
        assert "left out" not in run("caption", complete, COMMON).err


# Questions about them


def test_a_part_without_pictures_names_no_file_of_records(out: Path, caption: Caption) -> None:
    ran = caption("--shard", "0/1000000")

    assert (ran.code, out.exists(), "0 pictures answered in" in ran.err) == (0, False, True)
    assert "the records are in" not in ran.err


def test_every_part_tells_of_a_missing_folder_and_one_records_it(caption: Caption, tmp_path: Path) -> None:
    parts = [dataclasses.replace(caption, out=tmp_path / f"{part}.jsonl") for part in range(3)]
    ran = [part.of(tmp_path / "gone", "--shard", f"{number}/3") for number, part in enumerate(parts)]

    assert [one.code for one in ran] == [3, 3, 3]
    assert all("gone" in one.err for one in ran)
    assert sorted(part.out.exists() for part in parts) == [False, False, True]
    assert ["the records are in" in one.err for one in ran] == [part.out.exists() for part in parts]


def test_a_sheet_asks_every_question_of_every_picture(run: Run, folder: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "questions.jsonl"
    sheet.write_text(
        '{"question": "What is this?"}\n{"question": "Is it red?", "choices": ["Yes", "No"]}\n'
        '{"question": "Is it {stem}?", "input": "a hint"}\n'
    )

    ran = run("caption", str(folder), *COMMON, "--questions", str(sheet))

    assert ran.code == 0
    asked = Counter((Path(record["picture"]).name, record["prompt"], record["finish"]) for record in ran.records)
    common = itertools.product(NAMES, [("What is this?", "length"), ("Is it red?", "choice")])
    filled = [(name, f"Is it {Path(name).stem}?\na hint", "length") for name in NAMES]
    assert asked == Counter([*((name, *rest) for name, rest in common), *filled])
    alone = run("caption", str(folder), *COMMON, "--prompt", "What is this?")
    assert len(alone.records) == len(NAMES)
    for record in alone.records:
        assert (record["id"], record["text"]) in {(one["id"], one["text"]) for one in ran.records}


def test_a_manifest_brings_prompts_of_its_own_and_columns_for_others(run: Run, folder: Path) -> None:
    manifest = folder / "work.csv"
    manifest.write_text(
        f'picture,prompt,choices,breed\n{NAMES[0]},Is it a {{breed}}?,"Yes,No",collie\n'
        f"{NAMES[0]},,,collie\n{NAMES[1]},,,poodle\nmissing.png,,,\n"
    )

    ran = run("caption", "--manifest", str(manifest), *COMMON, "--prompt", "Where is the {breed}?")

    assert ran.code == 3
    asked = {(Path(record["picture"]).name, record["prompt"], record["finish"]) for record in ran.records}
    assert asked == {
        (NAMES[0], "Is it a collie?", "choice"),
        (NAMES[0], "Where is the collie?", "length"),
        (NAMES[1], "Where is the poodle?", "length"),
        ("missing.png", "Where is the ?", "error"),
    }


def test_an_unusable_prompt_costs_that_answer_only(folder: Path, caption: Caption) -> None:
    manifest = folder / "work.jsonl"
    lines = [
        {"picture": NAMES[0], "prompt": "word " * 2000},
        {"picture": NAMES[1], "prompt": "Is it a {breed}?"},
        {"picture": NAMES[2], "prompt": "What is this?"},
    ]
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not JSON\n")
    ran, again = (caption.of("--manifest", manifest) for _ in range(2))

    assert ran.code == again.code == 3
    records = {Path(record["picture"]).name: record for record in caption.records}
    codes = {name: record["error"] and record["error"]["code"] for name, record in records.items()}
    assert codes == {NAMES[0]: "prompt", NAMES[1]: "prompt", NAMES[2]: None, "work.jsonl:4": "manifest"}
    assert len(caption.records) == 4
    assert "0 pictures answered, 1 answered by an earlier run, 3 failed in an earlier run" in again.err


def test_text_of_a_manifest_tells_what_was_asked(run: Run, folder: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "asked.csv"
    manifest.write_text(f"picture,question\npictures/{NAMES[0]},What?\npictures/{NAMES[0]},Who?\n")

    ran = run("ask", "--manifest", str(manifest), *COMMON, "--format", "text")

    assert sorted(line.split(": ")[1].split(" ")[0] for line in ran.out.splitlines()) == ["What?", "Who?"]


def test_ask_captions_nothing_in_the_place_of_a_missing_question(run: Run, folder: Path, tmp_path: Path) -> None:
    asked, bare = tmp_path / "asked.csv", tmp_path / "bare.csv"
    asked.write_text(f"picture,question\npictures/{NAMES[0]},What?\npictures/{NAMES[1]},\n")
    bare.write_text(f"picture,sku\npictures/{NAMES[0]},7\n")

    blank = run("ask", "--manifest", str(asked), *COMMON)
    none = run("ask", "--manifest", str(bare), *COMMON)
    beside = run("ask", str(folder), "--manifest", str(asked), *COMMON)
    common = run("ask", "--manifest", str(bare), *COMMON, "--question", "What is {sku}?")

    assert (blank.code, none.code, beside.code, common.code) == (3, 2, 2, 0)
    codes = {Path(record["picture"]).name: record["error"] and record["error"]["code"] for record in blank.records}
    assert codes == {NAMES[0]: None, NAMES[1]: "prompt"}
    assert "--question" in none.err
    assert [record["prompt"] for record in common.records] == ["What is 7?"]


# Output


@pytest.mark.parametrize("num_lost", [0, 1])
def test_text_on_a_terminal_comes_in_the_order_of_the_pictures(
    run: Run, folder: Path, num_lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, names = LocalRunner.answer, [str(folder / name) for name in (*NAMES, "missing.png")]

    def backwards(*given: Any, **options: Any) -> Iterator[Any]:
        answers = [event for event in answer(*given, **options) if isinstance(event, Answer)]
        yield from sorted(answers, key=lambda one: -one.index)[: len(names) - num_lost]

    monkeypatch.setattr(LocalRunner, "answer", backwards)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    ran = run("caption", names, COMMON)

    assert [line.partition(": ")[0] for line in ran.out.splitlines()] == names[num_lost:-1]
    assert "missing.png" in ran.err


# Further runs


def test_failures_of_an_earlier_run_stand_until_they_are_to_be_tried_again(folder: Path, caption: Caption) -> None:
    good = (folder / NAMES[0]).read_bytes()
    (folder / NAMES[0]).write_bytes(good[: len(good) // 2])

    first, second, third = caption(), caption(), caption("--retry-errors")

    assert (first.code, second.code, third.code) == (3, 3, 3)
    assert "1 failed in an earlier run (--retry-errors tries them again)" in second.err
    assert "error:" not in second.err
    assert "0 pictures answered, 1 failed, 2 answered by an earlier run" in third.err
    assert len(caption.records) == 3  # a repeated failure is not recorded again
    (folder / NAMES[0]).write_bytes(good)
    mended = caption()
    assert mended.code == 0  # the picture has changed
    assert [record["error"] for record in caption.records].count(None) == 3


def test_a_torn_record_is_removed_and_a_run_that_starts_over_removes_all(out: Path, caption: Caption) -> None:
    caption()
    with open(out, "ab") as file:
        file.write(out.read_bytes()[:50])

    torn, over = caption(), caption("--overwrite")

    assert (torn.code, over.code, len(caption.records)) == (0, 0, 3)
    assert f"note: the last record in `{out}` was torn" in torn.err
    assert "3 pictures answered in" in over.err


def test_records_of_other_names_in_a_folder_do_not_count_and_are_noted(tmp_path: Path, caption: Caption) -> None:
    shards = tmp_path / "shards"
    note = f"not those in `{shards / '0.jsonl'}`; to continue them"
    shards.mkdir()
    dataclasses.replace(caption, out=shards / "0.jsonl")("--limit", "1")
    (shards / "0.jsonl").with_name("other.jsonl").touch()  # not of a run
    begun, continued = (dataclasses.replace(caption, out=shards)() for _ in range(2))
    over = dataclasses.replace(caption, out=shards)("--overwrite")
    assert (begun.code, continued.code, over.code) == (0, 0, 0)
    assert [note in ran.err for ran in (begun, continued, over)] == [True, False, False]
    assert len(list(read_records(shards / "part-00000.jsonl"))) == 3


@pytest.mark.parametrize("fault", ["model", "manifest", "lock"])
def test_a_run_that_cannot_begin_costs_no_records(
    fault: str, run: Run, folder: Path, out: Path, caption: Caption
) -> None:
    caption()
    before = out.read_bytes()
    if fault == "manifest":
        manifest_path(out).write_text("{")

    with RecordWriter(out) if fault == "lock" else nullcontext():
        ran = run("caption", str(folder), "--model", "nowhere", "--out", str(out), "--overwrite")

    assert (ran.code, "nowhere" in ran.err) == (1, fault == "model")  # others fail before the model is loaded
    assert out.read_bytes() == before
    RecordWriter(out).close()  # the file is not locked any more


def test_one_of_two_questions_that_was_answered_is_not_asked_again(
    folder: Path, tmp_path: Path, out: Path, caption: Caption
) -> None:
    sheet = tmp_path / "questions.txt"
    caption("--prompt", "What is this?")
    sheet.write_text("Who is this?\nWhat is this?\n")

    ran = caption("--questions", str(sheet), "--profile")

    assert "3 questions answered, 3 answered by an earlier run" in ran.err
    assert "\n3 questions in " in ran.err
    assert "per question\nlatency per question: p50" in ran.err
    first, _ = read_manifest(out)
    assert (first.job["inputs"]["paths"], first.end_reason) == ([str(folder)], "finished")
    assert first.job["questions"][0]["instruction"] == "What is this?"
    assert first.job["sampling"]["max_new_tokens"] == 4
    assert len({record["id"] for record in caption.records}) == 6


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_picture_that_was_missing_for_a_run_has_its_answer_as_the_last_word_again(
    is_renamed: bool, folder: Path, tmp_path: Path, caption: Caption
) -> None:
    kept, name = tmp_path / "kept.png", folder / NAMES[1]
    caption.of(name)
    name.rename(kept)
    name = folder / "new.png" if is_renamed else name
    away = caption.of(name)
    kept.rename(name)
    back, again = caption.of(name), caption.of(name)

    assert (away.code, back.code, again.code) == (3, 0, 0)
    assert [record["error"] is None for record in caption.records] == [True, False, True]
    assert "0 without an answer" in caption.export().err


def test_records_follow_a_folder_that_is_renamed_and_back_and_exports_use_names_that_exist(
    run: Run, folder: Path, tmp_path: Path, out: Path, caption: Caption
) -> None:
    caption()
    for before, after in itertools.pairwise([folder, tmp_path / "photographs", folder]):
        before.rename(after)
        again, once_more = (caption.of(after) for _ in range(2))
        assert again.code == 0
        assert "0 pictures answered, 3 answered by an earlier run (3 under" in again.err
        assert "3 answered by an earlier run in" in once_more.err

        rows = caption.export().records
        assert sorted(row["picture"] for row in rows) == sorted(map(str, after.iterdir()))
        assert {row["moved_from"] for row in rows} == {str(before / Path(row["picture"]).name) for row in rows}
        texts = run("export-records", str(out), "--to", "sidecars", "--out", str(tmp_path / "texts" / after.name))
        assert texts.code == 0
    assert len(caption.records) == 9
    assert len({(row["id"], row["text"]) for row in caption.records}) == 3  # copies of the first records
    assert len({row["run"] for row in caption.records}) == 3


def test_failures_follow_a_move_and_an_answer_supersedes_them(folder: Path, tmp_path: Path, caption: Caption) -> None:
    """`b.png` fails and is removed in one run; then `a.png` gets its name."""
    place = tmp_path / "place"
    place.mkdir()
    data = (folder / NAMES[1]).read_bytes()
    (place / "a.png").write_bytes(data)
    (place / "b.png").write_bytes(data[:300])
    (place / "c.png").write_bytes(data[:200])
    assert caption.of(place).code == 3
    (place / "b.png").unlink()
    (place / "a.png").rename(place / "b.png")
    moved = place.rename(tmp_path / "moved")
    assert caption.of(moved, "--retry-errors").code == 3
    rows = {row["picture"]: row["error"] for row in caption.export().records}
    assert {name: error is None for name, error in rows.items()} == {
        str(moved / "b.png"): True,
        str(moved / "c.png"): False,
        str(place / "b.png"): False,  # this content is nowhere now
    }
    (moved / "c.png").write_bytes((folder / NAMES[0]).read_bytes())
    assert caption.of(moved).code == 0
    answered = {row["picture"] for row in caption.export().records if row["error"] is None}
    assert answered == {str(moved / "b.png"), str(moved / "c.png")}


def test_a_job_goes_on_in_the_dtype_that_auto_chooses_and_another_one_is_told(
    out: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch, forget_models: Callable[[], None]
) -> None:
    told = "--dtype float32 continues them"
    caption("--dtype", "float32")

    same = caption()
    assert (len(caption.records), told in same.err) == (len(NAMES), False)

    monkeypatch.setattr("llama_adapter.app.models.number_formats.DtypeChoice._best", lambda *_: ("bfloat16", "a whim"))
    forget_models()
    other, again = caption(), caption()
    assert (len(caption.records), told in other.err, told in again.err) == (2 * len(NAMES), True, False)
    assert [one.spec["dtype"] for one in read_manifest(out)] == ["float32", "float32", "bfloat16", "bfloat16"]


def test_a_run_that_only_passes_over_known_pictures_tells_how_far_it_is(
    caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    caption()
    monkeypatch.setattr("llama_adapter.app.jobs.progress._ELSEWHERE_S", 0.0)

    ran = caption("--batch-size", "1", "--reader", "thread")

    assert " pictures, 0.00 pictures/s" in ran.err
    assert len(caption.records) == 3


def test_a_manifest_s_own_questions_are_counted(tmp_path: Path) -> None:
    manifest = tmp_path / "work.csv"
    manifest.write_text("picture,prompt,input\na.png,one,\na.png,two,\nb.png,,\nc.png,,here\n")
    job = Job(
        spec=CaptionerSpec(),
        inputs=InputSpec(manifests=(str(manifest),)),
        questions=tuple(Question() for _ in "abc"),
        n=4,
    )

    assert count_answers(job) == 4 * (2 + 3 + 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": "a.jsonl"}, "the same command goes on"),
        ({"out": "a.jsonl", "overwrite": True}, "the same command without --overwrite goes on"),
        ({}, "run the same command again; with --out, it would go on"),
    ],
)
def test_how_to_go_on(changes: dict[str, Any], words: str) -> None:
    job = Job(spec=CaptionerSpec(), inputs=InputSpec(), questions=(Question(),), **changes)
    assert how_to_go_on(job).startswith(words)


def test_a_run_that_is_stopped_at_once_says_so_and_leaves_the_engine_before_the_model_is_closed(
    out: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_in_use: list[bool] = []

    def stop(self: ResultWriter, answer: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResultWriter, "write", stop)
    monkeypatch.setattr(Captioner, "close", lambda self: was_in_use.append(self._turn.locked()))
    ran = caption()

    assert (ran.code, was_in_use) == (130, [False])
    assert read_manifest(out)[0].end_reason == "interrupted"


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT] * 2])
def test_an_interrupted_job_leaves_whole_records_and_says_so_in_its_manifest(
    signals: list[signal.Signals], out: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = signals.copy()
    after_each_answer(monkeypatch, lambda: [signal.raise_signal(left.pop()) for _ in tuple(left)])

    assert caption("--batch-size", "1").code == 130

    assert 1 <= len(caption.records) < len(NAMES)
    (noted,) = read_manifest(out)
    assert noted.end_reason == "interrupted"


def test_too_many_failures_stop_the_job_and_it_can_go_on(
    folder: Path, tmp_path: Path, out: Path, caption: Caption
) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{tmp_path}/missing-{number}.png\n" for number in range(60)) + f"{folder / NAMES[0]}\n")
    stopped, finished = (
        caption.of("--list", listed, "--batch-size", "2", *most) for most in (("--max-errors", "5"), ())
    )

    assert stopped.code == 1
    assert "as many as --max-errors allows" in stopped.err
    assert len(caption.records) - 1 >= 5 or finished.code == 3
    assert read_manifest(out)[0].end_reason == "failed"
    assert finished.code == 3
    assert len(caption.records) == 61


def test_unusable_prompts_count_for_max_errors(folder: Path, tmp_path: Path, caption: Caption) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(f"{folder / NAMES[1]}\n" * 9)
    ran = caption.of("--list", listed, "--prompt", "What is {title}?", "--max-errors", "3")

    assert ran.code == 1
    assert "3 failed, as many as --max-errors allows" in ran.err
    assert len(caption.records) == 3


def test_nothing_is_written_by_a_run_that_an_exception_has_ended(
    caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, written = ResultWriter.close, list[object]()

    def fail(self: ResultWriter, answer: object) -> None:
        written.append(answer)
        raise RuntimeError("no more")

    def close_and_write(self: ResultWriter) -> None:
        close(self)
        self.write(None)  # type: ignore[arg-type]

    monkeypatch.setattr(ResultWriter, "_write", fail)
    monkeypatch.setattr(ResultWriter, "close", close_and_write)

    assert (caption().code, len(written)) == (1, 1)


@pytest.mark.parametrize("is_stale", [False, True])  # an error other than a missing file, as of a network disk
def test_a_folder_that_goes_away_stops_the_job_and_blames_no_picture(
    is_stale: bool, folder: Path, tmp_path: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "away"
    for number in range(30):  # more pictures than are read ahead
        shutil.copy(picture("noise_128x96.png"), folder / f"{number}.png")

    def take_away() -> None:
        if not away.exists():
            folder.rename(away)
            if is_stale:
                folder.symlink_to(folder)

    after_each_answer(monkeypatch, take_away)
    lost = caption("--batch-size", "1")
    monkeypatch.undo()
    after = caption.records
    folder.unlink(missing_ok=True)
    away.rename(folder)
    back = caption("--batch-size", "1")

    assert lost.code == 1
    assert "disappeared during this run: its other pictures were not answered" in lost.err
    assert 0 < len(after) < 33
    assert all(record["error"] is None for record in after)
    assert back.code == 0
    assert sorted(record["picture"] for record in caption.records) == sorted(map(str, folder.iterdir()))


def test_records_that_are_removed_during_a_job_are_kept_and_end_it_with_an_error(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out" / "answers.jsonl"
    caption = Caption(run, folder, out)
    after_each_answer(monkeypatch, lambda: out.exists() and out.unlink())
    lost = caption()
    monkeypatch.undo()

    assert lost.code == 1
    assert "was removed or replaced while this run wrote into it: its 3 records were written" in lost.err
    assert "pictures answered" not in lost.err
    assert read_manifest(out)[0].end_reason == "failed"
    again = caption()
    assert (again.code, len(caption.records)) == (0, 3)
    assert "3 answered by an earlier run" in again.err


# Arguments, shell commands before the first run, and commands after which each input has pictures.
MENDED = {
    "folder": ("named", "true", "cp -r {images} named"),
    "sub-folder": ("named --recursive", "mkdir named", "cp -r {images} named/sub"),
    "file": ("named", "mkdir named", "rmdir named; cp {one} named"),
    "pattern": ("named/*.png", "mkdir named", "cp {one} named/a.png"),
    "archive": ("named.tar", "tar -cf named.tar -T /dev/null", "cp {one} a.png; tar -cf named.tar a.png"),
    "list": (
        "--list named.txt",
        "mkdir named; (echo named; head -c 1048577 /dev/zero | tr '\\0' x; echo) > named.txt",
        "cp {one} named/a.png; (echo named; echo {one}) > named.txt",
    ),
    "manifest": (
        "--manifest named.csv",
        "echo picture > named.csv; echo {one} >> named.csv; echo a.png, >> named.csv",
        "cp {one} a.png; sed -i s/,// named.csv",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("named", "begin", "mend"), MENDED.values(), ids=MENDED)
def test_an_input_that_failed_and_gives_pictures_later_has_no_failure_any_more(
    named: str, begin: str, mend: str, tmp_path: Path, out: Path, caption: Caption, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shell(command: str) -> None:
        line = command.format(images=Path(picture()).parent, one=picture())
        subprocess.run(line, shell=True, check=True)

    monkeypatch.chdir(tmp_path)
    shell(begin)
    first, same = caption.of(*named.split()), caption.of(*named.split())
    shell(mend)
    second = caption.of(*named.split())
    kept = out.read_bytes()
    again = caption.of(*named.split())

    assert (first.code, same.code, second.code, again.code) == (3, 3, 0, 0)
    assert "0 without an answer" in caption.export().err
    assert out.read_bytes() == kept


def test_a_folder_that_was_empty_for_a_run_and_is_so_again_tells_the_truth_each_time(
    folder: Path, tmp_path: Path, caption: Caption
) -> None:
    away = tmp_path / "away"
    told, num_records = [], []
    for is_empty in (False, True, False, True, True, False):
        if is_empty and not away.exists():
            folder.rename(away)
            folder.mkdir()
        elif not is_empty and away.exists():
            folder.rmdir()
            away.rename(folder)
        assert caption().code == (3 if is_empty else 0)
        told.append("1 without an answer" in caption.export().err)
        num_records.append(len(caption.records))

    assert told == [False, True, False, True, True, False]
    assert num_records == [3, 4, 5, 6, 6, 7]  # of the pictures answered before, one is asked again


def test_a_folder_whose_own_failure_stands_is_not_mended_by_pictures_of_another_input(
    folder: Path, caption: Caption
) -> None:
    inputs = folder / "..", folder
    caption.of(*inputs)
    shutil.copy(picture("noise_128x96.png"), folder / "more.png")

    assert caption.of(*inputs).code == 3
    assert "1 without an answer" in caption.export().err


def test_a_damaged_archive_keeps_its_failure_and_asks_nothing_again(
    folder: Path, tmp_path: Path, out: Path, caption: Caption
) -> None:
    archive = tmp_path / "shard.tar"
    with tarfile.open(archive, "w") as packed:
        for name in NAMES:
            packed.add(folder / name, arcname=name)
    archive.write_bytes(archive.read_bytes()[:-20_000])
    caption.of(archive)
    kept = out.read_bytes()

    assert caption.of(archive).code == 3
    assert out.read_bytes() == kept
    assert "1 without an answer" in caption.export().err


def test_unfamiliar_pictures_are_recorded_and_told_once_at_the_end(
    run: Run, folder: Path, tmp_path: Path, out: Path, caption: Caption
) -> None:
    bundle = convert(CaptionerSpec(**model_options()), tmp_path / "bundle")
    config = load_bundle(bundle).decoder_config
    queries = np.random.default_rng(1).standard_normal((20, config.num_queries, config.dim)).astype(np.float32)
    add_familiarity(bundle, dataclasses.replace(fit_queries(queries), threshold=0.0))
    ran = run("caption", str(folder), "--model", str(bundle), "--out", str(out))

    records = caption.records
    assert records
    assert all(record["unfamiliar"] for record in records if record["error"] is None)
    assert ran.err.count("trained on pictures unlike these") == 1
    assert run("caption", str(folder), "--model", str(bundle), "--quiet").err == ""
