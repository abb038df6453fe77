"""Other words for every question of the embedded model, as rules in text files. `wordings.py` expands them.

A file in `words/` holds rules, separated by ` ; ` or by line breaks. A `[heading]` names the rules below it; several
headings are separated by commas. An indented line goes on with the rule before it, a line that starts with `#` is a
comment, `3 x rule` stands for three rules, and `()` for a rule without words. Each rule is drawn equally often.

Inside a rule `(a|b|)` is a choice, `$name` a phrase of `phrases.txt` or a word of `word_lists.txt`. Names with a digit
or a capital are filled in from the scene: `$1` and `$2` objects ("the star"), `$N` what is counted ("red objects"),
`$K` a kind ("a red star"), `$R` a relation ("above"), `$S` where an object lies seen from `$2` ("on its left").
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("words")
OUTSIDE_ANSWER: Final = "I only know the shapes, colors, sizes, places and numbers of objects."

Rules = dict[str, tuple[str, ...]]


def read_rules(name: str) -> Rules:
    """The rules of words/`name`.txt by heading, in order; those before the first heading are under ""."""
    text = re.sub(r"\n +", " ", (FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    rules: dict[str, list[str]] = defaultdict(list)
    headings = [""]
    for line in text.splitlines():
        if line.startswith("["):
            headings = line.strip("[]").split(", ")
        elif line and not line.startswith("#"):
            stated = [re.findall(r"^(?:(\d+) x )?(.*)", one)[0] for one in line.split(" ; ")]
            found = ["" if rule == "()" else rule for times, rule in stated for _ in range(int(times or 1))]
            for heading in headings:
                rules[heading] += found
    return {heading: tuple(found) for heading, found in rules.items()}


def read_words(name: str) -> Rules:
    """The words of words/`name`.txt, whose rules are `key: word word`, by key."""
    lines = (line.partition(": ") for line in read_rules(name)[""])
    return {key: tuple("" if word == "()" else word for word in words.split()) for key, _, words in lines}


def _choices(name: str) -> dict[str, str]:
    """By heading, one template that is a choice between the rules."""
    return {
        heading: rules[0] if len(rules) == 1 else f"({'|'.join(rules)})" for heading, rules in read_rules(name).items()
    }


PHRASES: Final = _choices("phrases")
RELATIONS: Final = _choices("relations")
SEEN_FROM: Final = _choices("seen_from")
FRAMES: Final = read_rules("frames")
OUTSIDE: Final = read_rules("outside")[""]
OBJECTS: Final = read_rules("objects")
SYNONYMS: Final = read_rules("synonyms")
WORDS: Final = read_words("word_lists")
SPELLINGS: Final = read_words("spellings")
GRAMMAR: Final[dict[str, Rules]] = {}  # by task and form
for _heading, _rules in read_rules("questions").items():
    _task, _form = _heading.split()
    GRAMMAR.setdefault(_task, {})[_form] = _rules
