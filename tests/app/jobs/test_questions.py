"""Questions with variables, and defaults for questions that a file leaves open."""

import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.prompts import RawPrompt
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.questions import (
    TemplateError,
    complete,
    fill,
    is_template,
    picture_variables,
    questions_about,
)
from llama_adapter.app.pictures.inputs import QuestionFields


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("What is {stem}?", "What is cat.v2?"),
        ("{parent}/{name}", "b/cat.v2.png"),
        ("{path}", "a/b/cat.v2.png"),
        ("Is it a {breed}?", "Is it a collie {stem}?"),  # a filled-in value is not expanded again
        ("{{stem}} means {stem}", "{stem} means cat.v2"),
        ('Answer as {"a": 1}, {} or {0}', 'Answer as {"a": 1}, {} or {0}'),
        ("plain", "plain"),
    ],
)
def test_variables_are_filled_and_other_braces_stay(text: str, filled: str) -> None:
    variables = picture_variables("a/b/cat.v2.png", {"breed": "collie {stem}"})

    assert fill(Question(instruction=text), variables).instruction == filled
    assert fill(Question(raw=text), variables).raw == filled
    assert fill(Question(instruction="x", input=text), variables).input == filled


def test_columns_win_over_the_variables_of_the_name() -> None:
    assert picture_variables("a/b.png", {"stem": "mine"})["stem"] == "mine"


def test_an_unknown_variable_is_named_with_what_there_is() -> None:
    with pytest.raises(TemplateError, match=r"wants the variable \{breeds\}.*breed, name") as raised:
        fill(Question(instruction="Is it a {breeds}?"), picture_variables("a.png", {"breed": "collie"}))
    assert raised.value.hint == "write {{breeds}} for the text {breeds} itself"


def test_braces_alone_make_no_template() -> None:
    assert is_template(Question(instruction="{{name}}"))
    assert not is_template(Question(instruction="no { braces } at all"))


def test_a_files_own_question_takes_the_rest_from_the_jobs() -> None:
    common = Question(instruction="What?", input="context", task=OneOf(("a", "b")))

    assert complete(common, QuestionFields()) == common
    own = QuestionFields(instruction="Who?", choices=("c", "d"))
    assert complete(common, own) == Question(instruction="Who?", input="context", task=OneOf(("c", "d")))
    assert complete(Question(raw="raw"), QuestionFields(instruction="Who?")) == Question(instruction="Who?")
    assert complete(Question(raw="raw"), QuestionFields()).prompt("default") == RawPrompt("raw")


def test_a_files_choices_or_input_go_with_every_question_of_the_job() -> None:
    common = [Question(instruction=text) for text in ("What?", "Where?")]

    def asked(*own: QuestionFields) -> list[Question]:
        return questions_about(own, common=common)

    assert asked() == common
    assert asked(QuestionFields(choices=("a", "b"))) == [
        Question(instruction="What?", task=OneOf(("a", "b"))),
        Question(instruction="Where?", task=OneOf(("a", "b"))),
    ]
    assert [one.shown("") for one in asked(QuestionFields(input="x"), QuestionFields(instruction="Who?"))] == [
        "What?\nx",
        "Where?\nx",
        "Who?",
    ]
