"""Examples are split by picture: without leaks, stratified, and the same on every machine."""

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.learning.labelled.checks import check_split_names
from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.rows import split_name
from llama_adapter.app.learning.labelled.splitting import split_examples
from llama_adapter.app.pictures.inputs import InputsError
from tests.app.learning.labelled import tables

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


def example(picture: int, answer: str = "yes", *, split: str = "", question: str | None = None) -> Example:
    digest = hashlib.sha256(str(picture).encode()).hexdigest()
    return tables.example(answer, source=f"{picture}.png", instruction=question, split=split, digest=digest)


def digests(parts: dict[str, list[Example]]) -> dict[str, set[str]]:
    return {name: {one.digest for one in examples} for name, examples in parts.items()}


def sizes(parts: dict[str, list[Example]]) -> dict[str, int]:
    return {name: len(examples) for name, examples in parts.items()}


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from("abcd")), max_size=120), st.integers(0, 9))
def test_no_picture_is_in_two_parts_and_no_example_is_lost(pairs: list[tuple[int, str]], seed: int) -> None:
    examples = [example(picture, answer) for picture, answer in pairs]
    parts = split_examples(examples, shares=SHARES, seed=seed)

    assert list(parts) == list(SHARES)
    of_parts = digests(parts)
    assert sum(map(len, of_parts.values())) == len(set.union(*of_parts.values()))
    assert sum(map(len, parts.values())) == len(examples)


def test_every_answer_is_in_every_part_by_its_share() -> None:
    examples = [example(number, "rare" if number < 100 else "common") for number in range(1000)]
    parts = split_examples(examples, shares=SHARES, seed=1)

    assert sizes(parts) == {"train": 800, "validation": 100, "test": 100}
    for name, share in SHARES.items():
        counts = Counter(one.answers[0] for one in parts[name])
        assert counts["rare"] == pytest.approx(100 * share, abs=1)


def test_every_class_of_two_is_learnt() -> None:
    examples = [example(number, f"class {number // 2}") for number in range(200)]
    parts = split_examples(examples, shares={"train": 0.6, "test": 0.4}, seed=3)

    assert {one.answers[0] for one in parts["train"]} == {f"class {number}" for number in range(100)}
    assert sizes(parts)["test"] == pytest.approx(80, abs=1)


def test_the_order_and_names_do_not_matter_and_the_seed_does() -> None:
    examples = [example(number, str(number % 3)) for number in range(300)]
    shuffled = random.Random(5).sample(examples, len(examples))
    one = digests(split_examples(examples, shares=SHARES, seed=1))

    assert digests(split_examples(shuffled, shares=SHARES, seed=1)) == one
    assert digests(split_examples(examples, shares=SHARES, seed=2)) != one


def test_the_split_is_the_same_on_every_machine() -> None:
    parts = split_examples([example(number) for number in range(20)], shares={"train": 0.7, "test": 0.3}, seed=7)

    assert [one.item.label.removesuffix(".png") for one in parts["test"]] == ["2", "5", "11", "17", "18", "19"]


def test_a_split_of_the_data_wins_and_parts_that_it_lacks_are_taken_from_its_train() -> None:
    marked = [example(number, split="test" if number < 20 else "train") for number in range(110)]
    parts = split_examples(marked, shares=SHARES, seed=1)

    assert sizes(parts) == {"train": 80, "validation": 10, "test": 20}
    assert {one.split for one in parts["test"]} == {"test"}
    assert {one.split for one in parts["validation"] + parts["train"]} == {"train"}


def test_copies_of_a_held_out_picture_are_held_out_too_unless_the_data_say_otherwise() -> None:
    examples = [
        example(1, split="test", question="?"),
        example(1, question="!"),
        example(1, question=".", split="train"),
        example(2),
        example(3, split="dev set"),
    ]
    parts = split_examples(examples, shares={"train": 0.9, "test": 0.1}, seed=1)

    assert sizes(parts) == {"train": 2, "test": 2, "dev set": 1}


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ("train", "TRAIN", " Train ", "training")),
        ("validation", ("val", "valid", "validation", "dev")),
        ("test", ("test", "Testing", "EVAL", "evaluation\t")),
    ],
)
def test_usual_names_of_splits_are_known(split: str, names: tuple[str, ...]) -> None:
    found = Examples([example(1, split=split_name(name)) for name in names] + [example(2)])
    check_split_names(found, report=found.refuse)
    assert not found.problems
    assert [one.split for one in found.examples] == [split] * 4 + [""]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["Tset"] * 20 + ["train"] * 80, "tset (20 examples; did you mean test?); the others: train 80"),
        (["trian"] + [""] * 3, "trian (1 example; did you mean train?); the others: without a split 3"),
        (["valdiation"], "valdiation (1 example; did you mean validation?); the others: none"),
        (["holdout", "test"], "holdout (1 example); the others: test 1"),
        ([f"x{number}" for number in range(15)], "x9 (1 example), 5 more; the others: none"),
    ],
)
def test_unknown_names_of_splits_are_told_with_their_counts(names: list[str], told: str) -> None:
    found = Examples([example(number, split=split_name(name)) for number, name in enumerate(names)])
    check_split_names(found, report=found.refuse)
    (problem,) = found.problems
    assert problem.reason.endswith(told)
    with pytest.raises(InputsError, match="labelled data without errors, got 1"):
        found.require_sound()


def test_a_chosen_split_may_have_any_name() -> None:
    found = Examples([example(1, split="holdout"), example(2, split="tset")])
    check_split_names(found, report=found.warn, chosen="holdout")
    assert [("tset" in one.reason, "holdout" in one.reason, one.is_warning) for one in found.problems] == [
        (True, False, True)
    ]
