"""A task: how an answer is requested from the engine, completed, and identified in records."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt


class Task(Protocol):
    """The kind of answer to a prompt, with its parameters. Frozen, hashable and picklable."""

    @property
    def continuations(self) -> tuple[str, ...]:
        """Texts whose probabilities after the prompt are scored. If there are none, text is generated."""

    def settings(self) -> dict[str, Any]:
        """JSON values that distinguish records of the same prompt."""

    def complete(self, answer: Answer, *, prompt: EncodedPrompt, logprobs: tuple[float, ...]) -> Answer:
        """The answer to a successful request: `answer` with the fields that the task fills in.

        `answer` has the generated text and token ids. `logprobs` has the log-probability of each continuation.
        """


@dataclass(frozen=True, slots=True)
class FreeText:
    """Answer with generated text."""

    continuations: ClassVar[tuple[str, ...]] = ()

    def settings(self) -> dict[str, Any]:
        return {}

    def complete(self, answer: Answer, *, prompt: EncodedPrompt, logprobs: tuple[float, ...]) -> Answer:
        return answer


FREE_TEXT = FreeText()


@dataclass(frozen=True, slots=True)
class WithTokenIds:
    """Wraps a task, and adds the token ids of the text to its answers, as the detail `output_ids`."""

    task: Task

    @property
    def continuations(self) -> tuple[str, ...]:
        return self.task.continuations

    def settings(self) -> dict[str, Any]:
        return self.task.settings()

    def complete(self, answer: Answer, *, prompt: EncodedPrompt, logprobs: tuple[float, ...]) -> Answer:
        answer = self.task.complete(answer, prompt=prompt, logprobs=logprobs)
        return replace(answer, details={**answer.details, "output_ids": list(answer.token_ids)})


def task_settings(task: Task) -> dict[str, Any]:
    """`task.settings()` in the form that enters the id of a record: every id includes `choices`."""
    return {"choices": None, **task.settings()}
