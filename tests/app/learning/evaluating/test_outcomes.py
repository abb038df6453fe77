"""Examples asked in one call: the embedded model and its sample pictures, and examples that cannot be answered."""

import dataclasses
from collections.abc import Iterator

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.jobs.questions import TemplateError
from llama_adapter.app.learning.evaluating.outcomes import ask_examples
from llama_adapter.app.learning.labelled.example import Example
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.learning.labelled import tables
from tests.parity.exported import choice_limit

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def captioner() -> Iterator[Captioner]:
    with Captioner.load() as captioner:
        yield captioner


def example(instruction: str | None, answer: str, *, name: str | None = "12-red-star.jpg") -> Example:
    source = None if name is None else str(sample_pictures() / name)
    return tables.example(answer, source=source, instruction=instruction, columns={"color": "red"})


def test_choices_are_scored_and_other_answers_generated_in_the_order_of_the_examples(captioner: Captioner) -> None:
    red = example("Is there a {color} star?", "yes")
    chosen = dataclasses.replace(red, choices=("no", "yes"), task="choice")
    other = example(None, "a small purple triangle at the top", name="03-purple-triangle.png")
    caption = dataclasses.replace(other, task="caption")
    text = dataclasses.replace(example("Say {x}", "x", name=None), choices=("x", "y"))
    found = ask_examples(captioner, [chosen, caption, red, text], sampling=GREEDY)

    assert [one.answer for one in found[:3]] == ["yes", "a small purple triangle at the top", "yes"]
    assert [one.question for one in found] == [
        *("Is there a red star?", captioner.info.default_prompt, "Is there a red star?"),
        "Say {x}",  # no picture, so no variables
    ]
    direct = captioner.ask(str(chosen.item.source), "Is there a red star?", choices=["no", "yes"])
    assert found[0].probabilities == pytest.approx(tuple(direct.choice.values()), rel=choice_limit())
    assert found[0].choices == ("no", "yes")
    assert found[2].probabilities is None
    assert found[3].picture == ""
    assert found[3].probabilities == pytest.approx(
        tuple((captioner.generate_text("Say {x}", choices=["x", "y"])[0].choice or {}).values()), rel=choice_limit()
    )


def test_unreadable_pictures_are_left_out_and_what_the_model_cannot_answer_is_wrong(captioner: Captioner) -> None:
    long = dataclasses.replace(example("Is it? " * 1000, "yes"), choices=("yes", "no"))
    missing = example("Is it red?", "yes", name="missing.png")
    found = ask_examples(captioner, [missing, long, example("What color is the star?", "red")], sampling=GREEDY)

    assert [(one.answer, one.probabilities) for one in found] == [("", None), ("red", None)]


def test_a_variable_that_an_example_lacks_is_an_error_before_anything_is_asked(captioner: Captioner) -> None:
    with pytest.raises(TemplateError, match="size"):
        ask_examples(captioner, [example("Is it {size}?", "yes")], sampling=GREEDY)
