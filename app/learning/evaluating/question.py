"""The question that a labelled example asks. Imports no model."""

from llama_adapter.app.captioning.tasks.choose import choosing
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.questions import complete, fill, picture_variables
from llama_adapter.app.learning.labelled.example import Example


def question_of(example: Example, *, question: str | None) -> Question:
    """The question of an example; `question` is used for examples that have none.

    In questions about pictures, variables are filled in. In questions without a picture, braces are plain text.

    Raises TemplateError for an unknown variable.
    """
    common = Question(instruction=question, task=choosing(example.choices))
    asked = complete(common, example.question)
    if example.item.source is None:
        return asked
    return fill(asked, picture_variables(example.item.label, example.item.columns))
