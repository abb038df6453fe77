"""Finds whether the training grammar can make a sentence, with regular expressions built from its templates."""

import re
from collections.abc import Iterable
from functools import lru_cache

from scripts.train_embedded.grammar import FRAMES, GRAMMAR, OUTSIDE, PHRASES, RELATIONS, SEEN_FROM
from scripts.train_embedded.questions import Question
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES


def is_of_training(question: Question) -> bool:
    """Whether the grammar can ask this question for its task, without typing errors.

    Case and punctuation are ignored.
    """
    text = " ".join(re.sub(r"[?.,:!;'/-]", " ", question.text.lower()).split())
    return any(pattern.fullmatch(text) for pattern in _patterns(question.task))


@lru_cache
def _patterns(task: str) -> tuple[re.Pattern[str], ...]:
    forms = {"ask": OUTSIDE} if task == "outside" else GRAMMAR[task]
    return tuple(_sentences(form, templates) for form, templates in forms.items())


def _sentences(form: str, templates: Iterable[str]) -> re.Pattern[str]:
    """All questions that training can ask in a form, in lower case without punctuation.

    Any frame's start may meet any end.
    """
    before, after = zip(*(map(_pattern, frame.split("%")) for frame in FRAMES[form]), strict=True)
    inner = map(_pattern, templates)
    return re.compile(rf"(?:{'|'.join({*before})}) *(?:{'|'.join(inner)}) *(?:{'|'.join({*after})})")


def _pattern(template: str) -> str:
    """A regular expression for the sentences of a template."""
    parts = []
    for token in re.findall(r"[()|]|[^()|\s]+", template.lower()):
        name = re.match(r"\$(\w+)", token)
        if token in "()|":
            parts.append({"(": "(?:", ")": ")", "|": "|"}[token])
        elif name is None:
            parts.append(re.escape(re.sub(r"[?.,:!;'-]", " ", token).strip()) + " *")
        elif name[1] in PHRASES:
            parts.append(f"(?:{_pattern(PHRASES[name[1]])})")
        elif name[1] in ("r", "s"):
            parts.append(f"(?:{'|'.join(map(_pattern, (RELATIONS if name[1] == 'r' else SEEN_FROM).values()))}) *")
        else:
            parts.append(_NAMES + r"(?: s)? *")
    return "".join(parts)


_NAME = "|".join(
    (*SHAPES, *COLOR_NAMES, *SIZES, "crosse", "object", "thing", "item", "figure", "shape", "one", "piece")
)
_NAMES = rf"(?:(?:the|this|that|a|an|any|some|your|our) )?(?:{_NAME})s?(?: (?:{_NAME})s?)?"
