"""Questions in other words: rules of `grammar.py` filled in from a scene, put into frames, and with typing errors."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from string import ascii_lowercase

import numpy as np

from scripts.train_embedded.grammar import (
    FRAMES,
    GRAMMAR,
    OBJECTS,
    OUTSIDE,
    OUTSIDE_ANSWER,
    PHRASES,
    RELATIONS,
    SEEN_FROM,
    SPELLINGS,
    SYNONYMS,
    WORDS,
)
from scripts.train_embedded.questions import (
    NUMBERS,
    Labels,
    Question,
    count_labels,
    exist_labels,
    pick,
    plural,
    thing_labels,
    with_article,
)
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, Scene, Thing

FORMS = ("ask", "clause", "noun", "do")
FORM_SHARES = (0.5, 0.18, 0.16, 0.16)
VOWELS = "aeiou"
SIGNS = ",.:;-'"
COMMAND_ENDS = (*(".",) * 10, *("",) * 20, "!", "?", " .", "!", "?", "..", "!!", "...")
QUESTION_ENDS = (
    *(*("?",) * 24, *("",) * 12, *("??", " ?", ".", "!", "...", "?!", "???") * 2),
    *(" ??", "????", "?.", "..", ",", "!!", "!?", "??!", ".?"),
)
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")

Node = str | tuple[tuple["Node", ...], ...]  # a word, or a choice between sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word of a question. `labels` is what it refers to in the scene; `glued` means no space before it."""

    text: str
    labels: Labels | None = None
    glued: bool = False


Fill = Callable[[np.random.Generator], Sequence[Word]]


def words(text: str, labels: Labels | None = None) -> list[Word]:
    """The words of a phrase; the last word carries `labels`."""
    parts = text.split()
    return [*(Word(text=part) for part in parts[:-1]), Word(text=parts[-1], labels=labels)] if parts else []


def expand(template: str, fills: Mapping[str, Fill], rng: np.random.Generator) -> list[Word]:
    """One random sentence of a template. Raises KeyError for a phrase that is neither known nor in `fills`."""
    out: list[Word] = []
    _expand(_parse(template), fills, rng, out)
    return out


def _expand(nodes: Sequence[Node], fills: Mapping[str, Fill], rng: np.random.Generator, out: list[Word]) -> None:
    for node in nodes:
        if not isinstance(node, str):
            _expand(node[int(rng.integers(len(node)))], fills, rng, out)
            continue
        found = re.match(r"\$(\w+)|(%)", node)
        if found is None:
            out.append(Word(text=node, glued=node[0] == "'" and bool(out)))
            continue
        name, before = found[1] or found[2], len(out)
        if name in fills:
            out.extend(fills[name](rng))
        elif name in PHRASES:
            _expand(_parse(PHRASES[name]), fills, rng, out)
        else:
            out.append(Word(text=pick(rng, WORDS[name])))
        rest = node[found.end() :]
        if rest and len(out) > before:
            out[-1] = replace(out[-1], text=out[-1].text + rest)


@lru_cache(maxsize=4096)
def _parse(template: str) -> tuple[Node, ...]:
    tokens = re.findall(r"[()|]|[^()|\s]+", template)
    place = 0

    def sequence() -> tuple[Node, ...]:
        nonlocal place
        nodes: list[Node] = []
        while place < len(tokens) and tokens[place] not in ")|":
            if tokens[place] == "(":
                choices = []
                while tokens[place] != ")":
                    place += 1
                    choices.append(sequence())
                nodes.append(tuple(choices))
            else:
                nodes.append(tokens[place])
            place += 1
        return tuple(nodes)

    return sequence()


def reword(question: Question, scene: Scene, rng: np.random.Generator) -> Question:
    """The same question in other words.

    A few ask less (`a star`) or more (`red stars`), and the answer is changed to match.
    """
    form = FORMS[int(rng.choice(4, p=FORM_SHARES))]
    template = pick(rng, GRAMMAR[question.task][form])
    fills, answer = fills_for(question, scene, rng, whole="$Kshape" in template)
    return sentence(question.task, template, fills, answer, rng, frame=pick(rng, FRAMES[form]), command=form == "do")


def outside(rng: np.random.Generator) -> Question:
    """A question that the model cannot answer."""
    template = pick(rng, OUTSIDE)
    fills: dict[str, Fill] = {
        "1": lambda rng: words(_any_object(rng)),
        "2": lambda rng: words(_any_object(rng)),
        "K": lambda rng: words(with_article(f"{pick(rng, COLOR_NAMES)} {pick(rng, SHAPES)}")),
        "R": lambda rng: expand(RELATIONS[pick(rng, tuple(RELATIONS))], {}, rng),
        "nouns": lambda rng: words(_many(pick(rng, WORDS["noun"]))),
        "odds": lambda rng: words(_many(pick(rng, WORDS["oddshape"]))),
        "junk": lambda rng: words(pseudo_word(rng)),
    }
    frame = pick(rng, FRAMES["ask"]) if rng.random() < 0.5 else "%"
    return sentence("outside", template, fills, OUTSIDE_ANSWER, rng, frame=frame)


def sentence(
    task: str,
    template: str,
    fills: Mapping[str, Fill],
    answer: str,
    rng: np.random.Generator,
    *,
    frame: str = "%",
    command: bool = False,
) -> Question:
    """A question from a template in a frame, typed as people do; with `command` it ends like a command."""

    def asked(rng: np.random.Generator) -> list[Word]:
        return expand(template, fills, rng)

    text, found = write(careless(expand(frame, {**fills, "%": asked}, rng), rng), rng, command=command)
    return Question(task=task, text=text, answer=answer, words=found)


def fills_for(
    question: Question, scene: Scene, rng: np.random.Generator, *, whole: bool = False
) -> tuple[dict[str, Fill], str]:
    """The phrases that the templates of a task can name, filled in from the scene, and the answer.

    With `whole`, a kind is asked about with both its words.
    """
    task, about = question.task, question.about
    if task in ("caption", "count"):
        return {}, question.answer
    if task in ("count_shape", "count_color"):
        return _fills_of_count(task, about[0], scene, rng)
    if task == "exist":
        return _fills_of_kind(about[0], about[1], scene, rng, whole=whole)
    fills: dict[str, Fill] = {}
    names = [name for name in about if name not in RELATIONS]
    for relation in {*about} - {*names}:
        fills = {"R": partial(expand, RELATIONS[relation], {}), "S": partial(expand, SEEN_FROM[relation], {})}
    for slot, name in zip(("2",) if task == "rel_what" else ("1", "2"), names, strict=False):
        kind = "color" if task == "shape" else "shape"
        thing = next(thing for thing in scene if getattr(thing, kind) == name)
        fills[slot] = partial(_object, thing, scene, task=task)
        fills[f"{slot}bare"] = fills["Cword"] = _exactly(name, thing_labels(thing))
        if task == "color":
            fills["Colors"] = partial(_either, COLOR_NAMES, thing.color)
        if task == "shape":
            fills["Shapes"] = partial(_either, tuple(map(with_article, SHAPES)), with_article(thing.shape))
    return fills, question.answer


def _either(names: Sequence[str], right: str, rng: np.random.Generator) -> list[Word]:
    """Two to four of `names`, including the right one, joined by "or"."""
    others = [name for name in names if name != right]
    chosen = [right, *(others[int(index)] for index in rng.permutation(len(others))[: int(rng.integers(1, 4))])]
    first, *rest = (chosen[int(index)] for index in rng.permutation(len(chosen)))
    if rng.random() < 0.2:
        return words(" or ".join([first, *rest]))
    return words(f"{', '.join([first, *rest[:-1]])} or {rest[-1]}")


def _exactly(text: str, labels: Labels) -> Fill:
    return lambda _: words(text, labels)


def _fills_of_count(task: str, name: str, scene: Scene, rng: np.random.Generator) -> tuple[dict[str, Fill], str]:
    if task == "count_color":
        number = sum(thing.color == name for thing in scene)
        found = count_labels(number)

        def colored(rng: np.random.Generator) -> list[Word]:
            things = expand("$things", {}, rng)
            draw = rng.random()
            if draw < 0.72:
                return [*words(name, found), *(words("ones") if draw < 0.12 else things)]
            if draw < 0.78:
                return words(name, found)
            if draw < 0.82:
                return [*words(name, found), *words(pick(rng, ("colored", "coloured", "painted"))), *things]
            joint = pick(rng, OBJECTS["before a color to count"])
            return [*things, *words(f"{joint} {name}", found)]

        return {"N": colored, "P": lambda _: words(name, found)}, NUMBERS[number]
    color = pick(rng, [thing.color for thing in scene]) if rng.random() < 0.08 else None
    number = sum(thing.shape == name and color in (None, thing.color) for thing in scene)
    found = count_labels(number)
    before = f"{color} " if color else ""
    many = plural(name) if color or rng.random() < 0.94 else _many(_synonym(name, rng))

    def shaped(rng: np.random.Generator) -> list[Word]:
        named = many if rng.random() < 0.93 else pick(rng, OBJECTS["shapes to count"]).format(shape=name)
        return words(before + named, found)

    return {
        "N": shaped,
        "P": lambda _: words(before + many, found),
        "Nbare": lambda _: words(before + name, found),
    }, NUMBERS[number]


def _fills_of_kind(
    color: str, shape: str, scene: Scene, rng: np.random.Generator, *, whole: bool
) -> tuple[dict[str, Fill], str]:
    draw, synonym = rng.random(), shape
    if whole or draw < 0.82:
        exists = any((thing.shape, thing.color) == (shape, color) for thing in scene)
        phrases, synonym = OBJECTS["kind"], _synonym(shape, rng)
    elif draw < 0.92:
        if rng.random() < 0.4:
            shape = pick(rng, [thing.shape for thing in scene])
        exists = any(thing.shape == shape for thing in scene)
        phrases = OBJECTS["kind by shape"]
    else:
        exists = any(thing.color == color for thing in scene)
        phrases = OBJECTS["kind by color"]
    found = exist_labels(exists)

    def kind(rng: np.random.Generator) -> list[Word]:
        template = pick(rng, phrases).format(
            color=color, a_color=with_article(color), shape=shape, shapes=plural(shape), synonym=synonym
        )
        phrase = expand(template, {}, rng)
        named = [place for place, word in enumerate(phrase) if word.text in (color, shape, plural(shape))] or [
            len(phrase) - 1
        ]
        return [replace(word, labels=found) if place == named[-1] else word for place, word in enumerate(phrase)]

    return {
        "K": kind,
        "Kshape": lambda _: words(shape),
        "Kcolor": lambda _: words(color, found),
    }, "yes" if exists else "no"


def _object(thing: Thing, scene: Scene, rng: np.random.Generator, *, task: str) -> list[Word]:
    """A phrase for an object that its shape (in the task `shape`, its colour) identifies uniquely."""
    found, draw = thing_labels(thing), rng.random()
    if task == "shape" or (task not in ("color", "shape") and draw < 0.06 and _is_unique(thing, scene, "color")):
        noun = expand("$thing", {}, rng)
        if draw < 0.93:
            return [*words(f"the {thing.color}", found), *noun]
        if draw < 0.97:
            joint = pick(rng, OBJECTS["before a color"])
            return [Word(text="the"), *noun, *words(f"{joint} {thing.color}", found)]
        return [*words(f"{pick(rng, ('that', 'this', 'a'))} {thing.color}", found), *noun]
    rule = OBJECTS["object"][int(100 * draw)]
    if f"{{{task}}}" in rule:  # the question would tell its answer
        rule = OBJECTS["object"][-1]
    synonym = _synonym(thing.shape, rng) if "{synonym}" in rule else ""
    named = rule.format(shape=thing.shape, color=thing.color, size=thing.size, synonym=synonym)
    return [
        replace(word, text=word.text[:-1], labels=found) if word.text.endswith("*") else word
        for word in expand(named, {}, rng)
    ]


def _is_unique(thing: Thing, scene: Scene, attribute: str) -> bool:
    return [getattr(other, attribute) for other in scene].count(getattr(thing, attribute)) == 1


def _synonym(shape: str, rng: np.random.Generator) -> str:
    return pick(rng, SYNONYMS.get(shape, (shape,)))


def _many(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def _any_object(rng: np.random.Generator) -> str:
    color = f"{pick(rng, COLOR_NAMES)} " if rng.random() < 0.3 else ""
    return f"the {color}{pick(rng, (*SHAPES, *SHAPES, 'object', 'thing') if color else SHAPES)}"


def pseudo_word(rng: np.random.Generator) -> str:
    """A word without meaning, or a series of letters."""
    if rng.random() < 0.25:
        return "".join(pick(rng, ascii_lowercase) for _ in range(int(rng.integers(2, 9))))
    syllables = [pick(rng, WORDS["starts"]) + pick(rng, VOWELS) for _ in range(int(rng.integers(1, 4)))]
    return "".join(syllables) + pick(rng, WORDS["ends"])


def careless(said: list[Word], rng: np.random.Generator) -> list[Word]:
    """Sometimes leave out articles, add a word without meaning, and add typing errors."""
    if rng.random() < 0.1:
        said = [word for word in said if word.text not in ("the", "a", "an")] or said
    if rng.random() < 0.05:
        place = int(rng.integers(len(said) + 1))
        said = [*said[:place], Word(text=pseudo_word(rng)), *said[place:]]
    if rng.random() < 0.3:
        said = [replace(word, text=word.text.replace("'", "")) for word in said]
    if rng.random() < 0.4:
        said = list(said)
        for _ in range(1 + int(rng.random() < 0.4) + int(rng.random() < 0.15)):
            place = int(rng.integers(len(said)))
            said[place : place + 1] = _mistyped(said[place], rng)
    if rng.random() < 0.03:
        share = 0.3 if rng.random() < 0.7 else 1.0
        said = [
            replace(word, text=pick(rng, SPELLINGS[word.text]))
            if word.text in SPELLINGS and rng.random() < share
            else word
            for word in said
        ]
    return said


def _mistyped(word: Word, rng: np.random.Generator) -> list[Word]:
    """A word with a typing error; two words if the error is a space inside."""
    text, draw = word.text, rng.random()
    if draw < 0.07:
        return [replace(word, glued=True)]
    if draw < 0.27 and text in SPELLINGS:
        return [replace(word, text=pick(rng, SPELLINGS[text]))]
    if draw < 0.31:  # a misplaced punctuation mark
        return [replace(word, text=text + pick(rng, (",", ",", ".", ";", ":", "-", "'")))]
    if draw < 0.34:
        return [replace(word, text=text.upper())]
    if len(text) > 4 and draw < 0.38:
        place = int(rng.integers(2, len(text) - 1))
        return [replace(word, text=text[:place], labels=None), replace(word, text=text[place:], glued=False)]
    if len(text) > 2 and draw < 0.41:  # a key held too long
        place = int(rng.integers(len(text)))
        return [replace(word, text=text[:place] + text[place] * int(rng.integers(3, 6)) + text[place + 1 :])]
    vowels = [place for place, letter in enumerate(text) if place and letter in VOWELS]
    if len(text) > 3 and vowels and draw < 0.48:
        place = vowels[int(rng.integers(len(vowels)))]
        return [replace(word, text=text[:place] + pick(rng, VOWELS) + text[place + 1 :])]
    if len(text) > 3 or (len(text) == 3 and rng.random() < 0.4):
        return [replace(word, text=mistype(text, rng))]
    return [word]


def mistype(text: str, rng: np.random.Generator) -> str:
    """Swap two letters, drop one, double one, or hit a neighbouring key, mostly after the first letter."""
    place = int(rng.integers(0 if rng.random() < 0.15 else 1, len(text)))
    kind = int(rng.integers(5))
    if kind == 0 and place + 1 < len(text):
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    if kind <= 1 and len(text) > 3:
        return text[:place] + text[place + 1 :]
    if kind == 2:
        return text[: place + 1] + text[place:]
    row = next((row for row in KEYBOARD if text[place].lower() in row), text[place])
    near = row.find(text[place].lower()) + (1 if rng.random() < 0.5 else -1)
    key = row[near] if 0 <= near < len(row) else row[0]
    return text[:place] + key + text[place + (kind == 3) :]


def write(
    said: Sequence[Word], rng: np.random.Generator, *, command: bool = False
) -> tuple[str, tuple[tuple[int, Labels], ...]]:
    """The sentence with capitals and final punctuation, and (end, labels) of each word that refers to something."""
    draw = rng.random()
    changes = ((0.4, str.lower), (0.47, str.upper), (0.52, str.title), (0.53, str.swapcase))
    change = next((change for upto, change in changes if draw < upto), str)
    text, found = "", []
    for word in said:
        if text and not word.glued:
            text += "  " if rng.random() < 0.01 else " "
        text += change(word.text)
        if word.labels is not None:
            found.append((len(text.rstrip(SIGNS)), word.labels))
    text = text.rstrip(",:;- ")
    if draw >= 0.53 and rng.random() < 0.9:
        text = re.sub(r"(^|[.?!] +)([a-z])", lambda start: start[1] + start[2].upper(), text)
    return text + pick(rng, COMMAND_ENDS if command else QUESTION_ENDS), tuple(found)
