"""Questions in words that training never uses, to score how well the model understands new wordings.

They are written by hand, with kinds of typing errors that `wordings.py` does not have. Regular expressions built from
the training's rules tell whether training can make a sentence.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from string import ascii_lowercase
from typing import Final

import numpy as np

from scripts.train_embedded.grammar import (
    FRAMES,
    GRAMMAR,
    OUTSIDE,
    OUTSIDE_ANSWER,
    RELATIONS,
    SEEN_FROM,
    read_rules,
    read_words,
)
from scripts.train_embedded.questions import Question, pick, plural, with_article
from scripts.train_embedded.wordings import VOWELS
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES

Sentences = Mapping[str, tuple[str, ...]]  # templates by task

SENTENCES: Final[Sentences] = read_rules("held_out")
SECOND_LIST: Final[Sentences] = read_rules("second_list")
RELATION_WORDS: Final = read_rules("held_out_relations")
_PHRASES: Final = read_rules("phrases")
SOUNDS: Final = [(heard, wrong) for heard, (wrong,) in read_words("sounds").items()]


def held_out(
    question: Question,
    number: int,
    rng: np.random.Generator,
    *,
    sentences: Sentences = SENTENCES,
    mistyped: bool = False,
) -> Question:
    """The same question in sentence `number` of the task, modulo their count.

    With `mistyped` it has one or two typing errors.
    """
    about = dict(zip(_NAMES.get(question.task, ()), question.about, strict=False))
    if "relation" in about:
        about["relation"] = pick(rng, RELATION_WORDS[about["relation"]])
    if question.task == "exist":
        about["kind"] = with_article(f"{about['color']} {about['shape']}")
    if question.task in ("exist", "count_shape"):
        about["shapes"] = plural(about["shape"])
    text = sentences[question.task][number % len(sentences[question.task])].format(**about)
    return Question(task=question.task, text=_typed(text, rng, mistyped=mistyped), answer=question.answer)


def held_out_outside(
    number: int, rng: np.random.Generator, *, sentences: Sentences = SENTENCES, mistyped: bool = False
) -> Question:
    """A question that cannot be answered, in held-out words; the arguments are those of `held_out`."""
    text = sentences["outside"][number % len(sentences["outside"])]
    return Question(task="outside", text=_typed(text, rng, mistyped=mistyped), answer=OUTSIDE_ANSWER)


_NAMES = {
    "count_shape": ("shape",),
    "count_color": ("color",),
    "color": ("shape",),
    "shape": ("color",),
    "size": ("shape",),
    "where": ("shape",),
    "exist": ("color", "shape"),
    "rel_yn": ("shape", "relation", "other"),
    "rel_what": ("relation", "other"),
}


def _typed(text: str, rng: np.random.Generator, *, mistyped: bool) -> str:
    text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
    draw = rng.random()
    if draw < 0.25:
        text = text.lower().rstrip("?.!")
    elif draw < 0.3:
        text = text.upper()
    return _mistyped(text, rng) if mistyped else text


def _mistyped(text: str, rng: np.random.Generator) -> str:
    """Put a typing error into one or two words.

    Errors are a wrong vowel, an added or tripled letter, a space, or a spelling by sound.
    """
    words = text.split()
    long = [place for place, word in enumerate(words) if sum(map(str.isalpha, word)) > 3] or [0]
    for _ in range(1 + int(rng.random() < 0.4)):
        place = long[int(rng.integers(len(long)))]
        words[place] = _misspelled(words[place], rng)
    return " ".join(words)


def _misspelled(word: str, rng: np.random.Generator) -> str:
    place, kind = int(rng.integers(1, max(len(word) - 1, 2))), int(rng.integers(5))
    vowels = [at for at, letter in enumerate(word) if letter.lower() in VOWELS]
    sounds = [(heard, wrong) for heard, wrong in SOUNDS if heard in word]
    if kind == 0 and vowels:
        at = vowels[int(rng.integers(len(vowels)))]
        return word[:at] + pick(rng, [vowel for vowel in VOWELS if vowel != word[at].lower()]) + word[at + 1 :]
    if kind == 1:
        return f"{word[:place]} {word[place:]}"
    if kind == 2:
        return word[:place] + word[place] * 2 + word[place:]
    if kind == 3 and sounds:
        return word.replace(*sounds[int(rng.integers(len(sounds)))], 1)
    return word[:place] + pick(rng, ascii_lowercase) + word[place:]


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
    return re.compile(rf"(?:{'|'.join({*before})}) *(?:{_any_of(templates)}) *(?:{'|'.join({*after})})")


def _any_of(templates: Iterable[str]) -> str:
    """A regular expression for the sentences of all templates.

    A phrase at the end of several is stated once, and so is a rule with a weight; else compiling takes seconds.
    """
    starts: dict[str, list[str]] = {}  # by the phrase at the end
    for template in dict.fromkeys(templates):
        start, _, end = template.rpartition(" ")
        if end.startswith("$") and end[1:].lower() in _PHRASES:
            starts.setdefault(end, []).append(start)
        else:
            starts.setdefault("", []).append(template)
    return "|".join(f"(?:{'|'.join(map(_pattern, some))}){_pattern(end)}" for end, some in starts.items())


def _pattern(template: str) -> str:
    """A regular expression for the sentences of a template."""
    parts = []
    for token in re.findall(r"[()|]|[^()|\s]+", template.lower()):
        name = re.match(r"\$(\w+)", token)
        if token in "()|":
            parts.append({"(": "(?:", ")": ")", "|": "|"}[token])
        elif name is None:
            parts.append(re.escape(re.sub(r"[?.,:!;'-]", " ", token).strip()) + " *")
        elif name[1] in _PHRASES:
            parts.append(f"(?:{_any_of(_PHRASES[name[1]])})")
        elif name[1] in ("r", "s"):
            parts.append(f"(?:{'|'.join(map(_pattern, (RELATIONS if name[1] == 'r' else SEEN_FROM).values()))}) *")
        else:
            parts.append(_KINDS + r"(?: s)? *")
    return "".join(parts)


_KIND = "|".join(
    (*SHAPES, *COLOR_NAMES, *SIZES, "crosse", "object", "thing", "item", "figure", "shape", "one", "piece")
)
_KINDS = rf"(?:(?:the|this|that|a|an|any|some|your|our) )?(?:{_KIND})s?(?: (?:{_KIND})s?)?"
