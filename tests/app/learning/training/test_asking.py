"""Examples become the tokens and labels of the reference's trainer, with default questions if the data have none."""

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
from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.training.asking import Asker, default_question, learned_questions
from llama_adapter.app.learning.training.batches import padded
from llama_adapter.app.learning.training.job import Optimisation, TrainJob
from llama_adapter.app.learning.training.prepare import read_data, run_digest
from llama_adapter.app.learning.training.results import _quoted, ask_command, calibrate_command, score_command
from llama_adapter.app.models.checkpoints import StoredQuestions
from llama_adapter.app.pictures.inputs import InputsError
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.training.layout import IGNORED
from llama_adapter.runtime.errors import UsageError
from tests.app.golden import GOLDEN
from tests.app.learning.labelled import tables
from tests.app.learning.training.pets import draw_pets, job_of, prepared
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
    assert len({digest(), digest(seed=1), digest(optimisation=Optimisation(batch_size=4))}) == 3


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
    rows = ({"image": f"pets/ring/{number}.png", "text": "a ring", "hue": f"{number}"} for number in range(8))
    job = job_of(tmp_path, *rows, question=question)
    scoring = score_command(job, prepared(job), bundle=None)
    assert (f"--question '{question}'" in scoring) == is_told


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
