"""A question about a picture, as a plain value."""

from collections.abc import Iterator
from dataclasses import dataclass

from llama_adapter.app.captioning.tasks.prompts import Dialogue, Prompt, RawPrompt, shown_prompt
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.llm.conversation import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question about a picture. Without `instruction` and `raw`, it is the model's own caption prompt."""

    instruction: str | None = None
    input: str | None = None
    raw: str | None = None
    task: Task = FREE_TEXT
    turns: tuple[Turn, ...] = ()  # earlier turns, for templates with turns; the question is then the last turn's text
    pictures: tuple[tuple[int, ...], ...] = ()  # see `Dialogue`
    template_values: str = ""  # as `values` of a `Dialogue`

    def prompt(self, default: str) -> Prompt:
        """The prompt for a captioner; `default` is the model's caption prompt."""
        if self.raw is not None:
            return RawPrompt(self.raw)
        instruction = default if self.instruction is None else self.instruction
        if self.turns or self.template_values or any(map(any, self.pictures)):
            return Dialogue(self.turns, question=instruction, pictures=self.pictures, values=self.template_values)
        return instruction if self.input is None else (instruction, self.input)

    def shown(self, default: str) -> str:
        """The prompt as shown in records."""
        return shown_prompt(self.prompt(default))

    @property
    def form(self) -> str:
        """`instruction` or `raw`. Together with `input`, it distinguishes prompts that records show in the same way."""
        return "instruction" if self.raw is None else "raw"

    @property
    def is_caption(self) -> bool:
        """Whether the question is the model's own caption prompt."""
        return self.instruction is None and self.raw is None

    def texts(self) -> Iterator[str]:
        """The given texts of the prompt."""
        return (text for text in (self.instruction, self.input, self.raw) if text is not None)
