"""Questions to start from, read from `assets/prompts.json`: what the embedded model knows, or general ones."""

import json
from dataclasses import dataclass
from functools import cache

from llama_adapter.app.models.resources import sample_pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A question with the few words that stand on its button."""

    label: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Templates:
    """What a page offers for one kind of model."""

    prompts: tuple[Template, ...]  # for Chat
    questions: tuple[Template, ...]  # for Yes/No
    question: str  # that stands there at first
    choices: tuple[str, ...]


@cache
def templates(*, is_embedded: bool) -> Templates:
    """The questions for the embedded model, or for real ones."""
    file = sample_pictures().parent / "prompts.json"
    kind = json.loads(file.read_text(encoding="utf-8"))["embedded" if is_embedded else "general"]
    return Templates(
        prompts=tuple(Template(**entry) for entry in kind["prompts"]),
        questions=tuple(Template(**entry) for entry in kind["questions"]),
        question=kind["question"],
        choices=tuple(kind["choices"]),
    )
