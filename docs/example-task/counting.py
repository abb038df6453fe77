"""An example task in its own package: it counts things, and adds the mean count over all choices to the record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.entry import Option, RequestField, TaskEntry
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt
from llama_adapter.app.captioning.tasks.question import Question


@dataclass(frozen=True, slots=True)
class Count:
    continuations = ("zero", "one", "two", "three")  # scored as continuations of the prompt

    def settings(self) -> dict[str, Any]:
        return {"task": "count"}  # part of the identity of its records

    def complete(self, answer: Answer, *, prompt: EncodedPrompt, logprobs: tuple[float, ...]) -> Answer:
        answer = OneOf(self.continuations).complete(answer, prompt=prompt, logprobs=logprobs)
        mean = sum(number * share for number, share in enumerate((answer.choice or {}).values()))
        return replace(answer, details={"mean": round(mean, 3)})  # additional fields of the record


def _question(values: Mapping[str, Any]) -> Question:
    if not values.get("things"):
        raise ValueError("things is missing: say what to count")
    return Question(instruction=f"How many {values['things']} are there?", task=Count())


_FIELD = RequestField(name="count_things", description="What to count, such as `red objects`.")
_THINGS = Option(name="things", flag="--things", metavar="NAME", help="what to count", request=_FIELD)
COUNT = TaskEntry(
    name="count", command="count", help="count things", options=(_THINGS,), question=_question, answers="a number"
)
