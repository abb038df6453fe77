"""Examples become the tokens and labels of the reference's trainer, and tables of a run's parts give them again."""

import json
import shlex
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.captioning.tasks.choose import parse_choices
from llama_adapter.app.captioning.tasks.prompts import PromptEncoder
from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.training.asking import Asker, default_question, learned_questions
from llama_adapter.app.learning.training.batches import padded
from llama_adapter.app.learning.training.job import Optimisation, TrainJob
from llama_adapter.app.learning.training.part_tables import table_rows
from llama_adapter.app.learning.training.prepare import read_data, run_digest
from llama_adapter.app.learning.training.results import _quoted, ask_command, calibrate_command, score_command
from llama_adapter.app.models.checkpoints import StoredQuestions
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.training.layout import IGNORED
from llama_adapter.runtime.errors import UsageError
from tests.app.golden import GOLDEN
from tests.app.learning.labelled import tables
from tests.app.learning.labelled.tables import reasons, write_lines
from tests.app.learning.training.pets import draw_pets, job_of, prepared
from tests.app.pictures.inputs.files import tar_bytes
from tests.parity.golden import CASES, tensors

example = partial(tables.example, source="a.png", instruction="What is it?", columns={"place": "Rome"})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(GOLDEN / "LLaMA/tokenizer.model")


@pytest.fixture(scope="module")
def asker(tokenizer: Tokenizer) -> Asker:
    return Asker(tokenizer, default_prompt="Describe it")


@pytest.mark.proves("training", "CPU")
def test_tokens_and_labels_are_the_references(asker: Asker) -> None:
    case = next(case for case in CASES["loss"] if case["name"] == "BIAS-TINY")
    golden = tensors("loss_BIAS-TINY")
    rows = [
        asker.ask(example(answer, instruction=asked["instruction"], input=asked["input"])).rows[0]
        for asked, answer in zip(case["prompts"], case["answers"], strict=True)
    ]
    tokens_BS, labels_BS = padded(rows)
    width = case["max_words"]  # the reference cuts longer rows off

    assert torch.equal(tokens_BS[:, :width], golden["tokens"])
    assert torch.equal(labels_BS.masked_fill(labels_BS == IGNORED, 0)[:, :width], golden["labels"])


def test_the_prompt_is_that_of_an_answering_model(asker: Asker, tokenizer: Tokenizer) -> None:
    encoder = PromptEncoder(tokenizer, check=lambda prompt, answers: None)
    asked = asker.ask(example("in Rome", instruction="Where is {stem}, {place}?"))
    encoded = encoder.encode("Where is a, Rome?", ("in Rome",))

    assert asked.rows[0].token_ids == (*encoded.token_ids, *encoded.continuations[0], tokenizer.eos_id)
    assert asked.rows[0].num_prompt == len(encoded.token_ids)
    text = asker.ask(example("4", source=None, instruction="Is {2} + {2} four?"))
    assert text.prompt == "Is {2} + {2} four?", "braces of texts are plain"


def test_captions_have_a_row_for_each_right_answer_and_others_one(asker: Asker) -> None:
    assert len(asker.ask(example("a cat", "one cat", task="caption")).rows) == 2
    assert len(asker.ask(example("cat", "cats")).rows) == 1


def test_classes_make_a_question() -> None:
    few = example("b", task="choice", choices=("a", "b"))
    many = example("b", task="choice", choices=tuple("abcdefghijk"))

    assert default_question(few) == "Which of these is it: a, b?"
    assert default_question(many) == "Which class is this?"
    assert default_question(example("a cat on a mat", task="caption")) is None


def caption(instruction: str | None = None) -> Example:
    return example("a cat on a mat", task="caption", instruction=instruction)


BASE = StoredQuestions(prompt="Describe it", question="Which hue is it?")


@pytest.mark.parametrize(
    ("examples", "learned"),
    [
        ([example("a"), example("b")], ("What is it?", "What is it?")),  # without captions, it is the prompt too
        ([example("a"), example("b", source=None)], ("Describe it", "What is it?")),
        ([example("a"), example("b", input="a text")], ("What is it?", "What is it?")),
        ([example("a"), example("b", instruction="Why?")], ("Describe it", None)),
        ([example("a", instruction="Is {{it}} in {place}?")], ("Is {it} in Rome?", "Is {it} in Rome?")),
        ([example("a", instruction=" ")], ("Describe it", None)),
        ([caption(), caption()], ("Describe it", "Which hue is it?")),
        ([caption("Say {{it}}."), example("a")], ("Say {it}.", "What is it?")),
        ([caption("Say a."), caption("Say b.")], ("Describe it", "Which hue is it?")),
    ],
)
def test_a_model_stores_the_only_question_that_it_learned(
    examples: list[Example], learned: tuple[str, str | None], asker: Asker
) -> None:
    found = learned_questions([asker.ask(one) for one in examples], base=BASE)
    assert (found.prompt, found.question) == learned


def test_captions_do_not_get_the_question_that_a_model_learned_in_their_place() -> None:
    classes = StoredQuestions(prompt="Which class is this?", question="Which class is this?")

    assert classes.of_captions == StoredQuestions(question="Which class is this?")
    assert BASE.of_captions == BASE


def test_what_does_not_fit_the_context_is_named(asker: Asker) -> None:
    short, long, unfilled = example("yes"), example("yes yes"), example("no", input="{gone}")
    context, too_many = (asker.ask(one).num_tokens for one in (short, long))
    found = Examples(examples=[short, long, unfilled])
    asker.ask_all(found, context=context)

    assert found.examples == [short]
    first, second = (one.reason for one in found.problems)
    assert first == f"its prompt and answer have {too_many} tokens, and the context {context}"
    assert second.startswith("The prompt wants the variable {gone}")


def test_a_run_is_known_by_its_data_and_settings(tmp_path: Path) -> None:
    folder = draw_pets(tmp_path / "pets", each=10)

    def digest(**changes: Any) -> str:
        job = TrainJob(data=(str(folder),), out="a.pth", **changes).with_rate(width=64)
        data = prepared(job)
        assert [len(part) for part in (data.train, data.validation, data.test)] == [16, 2, 2]
        return run_digest(job, data)

    assert digest() == digest(optimisation=Optimisation(rows=2)), "how many rows are computed at once does not matter"
    others = {"seed": 1}, {"optimisation": Optimisation(batch_size=4)}, {"spec": CaptionerSpec(exif="ignore")}
    assert len({digest(), *(digest(**other) for other in others)}) == 4


def test_open_answers_need_a_question(tmp_path: Path) -> None:
    draw_pets(tmp_path / "pets", each=1)
    job = job_of(tmp_path, {"image": "pets/ring/0.png", "answer": "a ring"})
    with pytest.raises(UsageError, match="Wanted a question for every example, but 1 of 1 have none") as refused:
        read_data(job)
    assert "--question" in refused.value.hint


def test_pictures_of_a_table_may_be_in_another_folder(tmp_path: Path) -> None:
    draw_pets(tmp_path / "pets", each=1)
    (tmp_path / "table").mkdir()
    row = {"image": "ring/0.png", "caption": "a ring"}
    (found,) = read_data(job_of(tmp_path / "table", row, pictures=str(tmp_path / "pets"))).examples
    assert found.item.source == str(tmp_path / "pets/ring/0.png")


def test_values_out_of_range_are_refused() -> None:
    for values, words in (
        ({"out": "a.bin"}, "out must be the name of a .pth file"),
        ({"validation": 0.6, "test": 0.5}, "leave some to learn"),
        ({"most_unreadable": 2.0}, "most_unreadable must lie in 0..1"),
        ({"resume": True, "force": True}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainJob(**{"data": ("a",), "out": "a.pth", **values})
    for wrong in ({"batch_size": 0}, {"lr": 0.0}, {"warmup": 1.5}, {"max_norm": -1.0}, {"epochs": float("inf")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Optimisation(**wrong)


def test_rates_fall_with_the_width_and_differ_by_kind() -> None:
    job = TrainJob(data=("a",), out="a.pth")

    assert job.with_rate(width=4096).lr == pytest.approx(1.5e-3)
    assert job.with_rate(width=192).lr == pytest.approx(3.2e-2)
    assert (job.rate_factor("gates"), job.rate_factor("visual blocks")) == (1.0, pytest.approx(0.1))


def test_commands_of_a_run_are_quoted_and_leave_out_what_a_flag_cannot_say(tmp_path: Path) -> None:
    folder = draw_pets(tmp_path / "pets", each=10)

    def commands() -> list[str]:
        job = TrainJob(data=(str(folder),), out="my pets.pth")
        data, bundle = prepared(job), Path("my pets.training/bundle")
        return [str(make(job, data, bundle=bundle)) for make in (ask_command, score_command, calibrate_command)]

    asking, evaluating, calibrating = commands()
    model = "--model 'my pets.training/bundle'"
    question = "--question 'Which of these is it: ring, triangle?'"
    assert asking == f"llama-adapter ask PICTURE {model} {question} --choices ring,triangle"
    assert evaluating == f"llama-adapter eval 'my pets.training/test.jsonl' {model} --out 'my pets.training/scores'"
    assert calibrating == (
        f"llama-adapter ask --calibrate 'my pets.training/validation.jsonl' {model} --choices ring,triangle "
        "--calibration-out 'my pets.training/calibration.json'"
    )
    for name in ("{ring}, red", "Sel, d'Été", "[ring"):
        (folder / "ring").rename(folder / name)
        asking, _, calibrating = commands()
        assert asking.startswith(f"llama-adapter ask PICTURE {model} --question ")
        for words in map(shlex.split, (asking, calibrating)):
            assert set(parse_choices(words[words.index("--choices") + 1])) == {name, "triangle"}
        (folder / name).rename(folder / "ring")
    (folder / "ring").rename(folder / "-1")
    (folder / "triangle").rename(folder / "-2")
    assert commands()[0].endswith(" --choices=-1,-2"), "else it is read as a flag"
    assert "--choices=-1,-2" in commands()[2]


@pytest.mark.parametrize(("question", "is_told"), [(None, False), ("Describe.", False), ("Describe {hue}.", True)])
def test_only_a_question_that_is_not_stored_is_told_for_scoring(
    question: str | None, is_told: bool, tmp_path: Path
) -> None:
    draw_pets(tmp_path / "pets", each=8)
    rows = [{"image": f"pets/ring/{number}.png", "text": "a ring", "hue": f"{number}"} for number in range(8)]
    job = job_of(tmp_path, *rows, question=question)
    scoring = score_command(job, prepared(job), bundle=None)
    assert (f"--question '{question}'" in scoring) == is_told
    assert "--task" not in scoring
    mixed = job_of(tmp_path, *rows, *({**row, "question": "Red?", "choices": ["a ring", "no"]} for row in rows))
    assert " --task open " in score_command(mixed, prepared(mixed), bundle=None), "`eval` refuses both kinds at once"


@pytest.mark.parametrize("question", ["two\nlines, it's \\", "\x1b[31m", "\u2028 \u202e \x85", "one line"])
def test_a_shell_reads_back_what_a_command_quotes(question: str) -> None:
    quoted = _quoted(question)

    assert quoted.isprintable()
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, env={"LC_ALL": "C.UTF-8"})
    assert printed.stdout.decode() == question


@pytest.mark.parametrize("own", [{"question": "Is it {hue}?", "hue": "red"}, {"question": "Read.", "input": "a"}])
def test_what_flags_cannot_ask_is_asked_by_a_table(tmp_path: Path, own: dict[str, str]) -> None:
    draw_pets(tmp_path / "pets", each=8)
    rows = ({"image": f"pets/ring/{number}.png", "answer": "yes", **own} for number in range(8))
    job = job_of(tmp_path, *rows, out="a.pth")
    asking = ask_command(job, prepared(job), bundle=None)
    assert asking == "llama-adapter ask --manifest a.training/train.jsonl --adapter a.pth"


@pytest.mark.parametrize(
    ("splits", "shares", "told"),
    [
        (["", ""], {}, "Wanted at least 4 examples to learn, got 2"),
        (["test"] * 9, {}, "at least 4 examples to learn, got 0; 9 for test"),
        ([*["val"] * 8, "test"], {}, "got 0; 8 for validation; 1 for test"),
        ([""] * 5, {}, "in each split, got none for `test` of 5"),
        ([""] * 4, {"validation": 0, "test": 0}, None),
        ([""] * 8, {}, None),
        (["train"] * 5 + ["val"], {"test": 0}, None),
        (["train"] * 8 + ["Tset"] * 2, {}, "without errors, got 1"),
    ],
)
def test_too_few_examples_and_unknown_splits_are_refused(
    splits: list[str], shares: dict[str, float], told: str | None, tmp_path: Path
) -> None:
    rows = ({"question": f"What is {index}?", "answer": "a", "split": split} for index, split in enumerate(splits))
    job = job_of(tmp_path, *rows, **shares)
    refused = nullcontext() if told is None else pytest.raises((InputsError, UsageError), match=told)
    with refused:
        assert len(prepared(job).everything) == len(splits)


def shown(example: Example) -> tuple[object, ...]:
    """What the model sees of an example, its right answer, and the rest of its row."""
    asked, columns = question_of(example, question="What is it?").shown("Describe it."), dict(example.item.columns)
    return (example.digest, asked, example.task, example.answers, example.choices, example.part, columns)


def write_data(folder: Path) -> list[str]:
    """Write data in every form; returns their names, relative to the folder."""
    for name in ("photos/{a}, b/1.png", "photos/{a}, b/zwölf \udcff.png", "photos/dog/2.png", "val2014/1.jpg", "p.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode(errors="surrogateescape"))
    write_lines(folder / "coco_pope_random.json", {"image": "1.jpg", "text": "Is it red?", "label": "no"})
    rows = [
        {"picture": "p.png", "question": "Is {stem} of {hue} {{x}}?", "hue": "{red}", "answer": "yes", "part": "one"},
        {"picture": "p.png", "question": "Why?", "input": '{"a": 1}', "answers": ["a b", "c"], "split": "test"},
        {"picture": "p.png", "caption": "A star."},
        {"picture": "p.png", "caption": "It shines."},
        {"question": "Is {this} a brace?", "answer": "yes", "choices": ["yes", "no", "n, o"]},
    ]
    write_lines(folder / "rows.jsonl", *rows)
    asked = b'{"question": "Hue?", "answer": "red"}'
    members = {"x/1.png": b"1", "x/1.json": asked, "2.png": b"2", "2.txt": b"A star."}
    for name, mode in (("plain.tar", "w"), ("small.tar.gz", "w:gz")):
        (folder / name).write_bytes(tar_bytes({mode + key: value for key, value in members.items()}, mode=mode))
    return ["photos", "coco_pope_random.json", "rows.jsonl", "plain.tar", "small.tar.gz"]


@pytest.mark.proves("train: tables of parts", "CPU")
def test_a_table_is_read_as_the_examples_it_was_written_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    names = write_data(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    found = read_data(TrainJob(data=tuple(names), out="a.pth"))
    found.require_sound()
    assert len(found.examples) == 12
    table = write_lines(tmp_path / "elsewhere" / "test.jsonl", *table_rows(found.examples, part="test"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "data").rename(tmp_path / "moved")
    (tmp_path / "data").symlink_to(tmp_path / "moved")
    again = read_examples("test.jsonl")

    again.require_sound()
    assert [shown(one) for one in again.examples] == [shown(one) for one in found.examples]
    assert {one.split for one in again.examples} == {"test"}
    second = [json.dumps(row) for row in table_rows(again.examples, part="test")]
    first = table.read_text().replace("/data/", "/moved/")
    assert "\n".join(second) + "\n" == first, "a table of a table is the same"


def test_many_classes_are_listed_only_where_they_do_not_follow_from_the_labels(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / "photos" / f"class {number}").mkdir(parents=True)
        (tmp_path / "photos" / f"class {number}" / "1.png").write_bytes(bytes([number]))
    found = read_data(TrainJob(data=(str(tmp_path / "photos"),), out="a.pth"))
    for examples, has_choices in ((found.examples, False), (found.examples[1:], True)):
        table = write_lines(tmp_path / "test.jsonl", *table_rows(examples, part="test"))
        assert ("choices" in table.read_text()) == has_choices
        assert [shown(one) for one in read_examples(str(table)).examples] == [shown(one) for one in examples]


def test_pictures_in_archives_that_a_table_names(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar_bytes({"1.png": b"1", "2.png": b"22"}, mode="w:gz"))
    (tmp_path / "cut.tar").write_bytes(tar_bytes({"1.png": b"1"})[:700])
    names = ("a.tar.gz/1.png", "a.tar.gz/3.png", "cut.tar/1.png")
    table = write_lines(tmp_path / "table.jsonl", *({"picture": name, "caption": "A star."} for name in names))
    found = read_examples(str(table))
    said = reasons(found, folder=tmp_path)

    assert [one.item.source for one in found.examples][:1] == [b"1"]
    assert any(text.startswith("table.jsonl, line 2: its picture a.tar.gz/3.png does not exist") for text in said)
    assert any("cut.tar" in text and "damaged" in text for text in said)
