"""What is asked of a labelled example. Imports no model."""

from llama_adapter.app.jobs.questions import complete, fill, picture_variables
from llama_adapter.app.labelled.example import Example
from llama_adapter.app.tasks.choose import choosing
from llama_adapter.app.tasks.question import Question


def question_of(example: Example, *, question: str | None) -> Question:
    """What is asked of an example; `question` is that of examples without one.

    Variables of questions about pictures are filled in. Braces of texts without a picture are plain text.

    Raises TemplateError for an unknown variable.
    """
    common = Question(instruction=question, task=choosing(example.choices))
    asked = complete(common, example.question)
    if example.item.source is None:
        return asked
    return fill(asked, picture_variables(example.item.label, example.item.columns))
