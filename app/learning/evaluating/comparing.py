"""`eval --against`: compares an evaluation with an earlier one, example by example."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from llama_adapter.app.learning.evaluating.data import EvaluationData
from llama_adapter.app.learning.evaluating.outcomes import SavedOutcomes, question_of, read_outcomes
from llama_adapter.app.learning.scores.compare import Comparison, compare
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_excerpt, shown_name

OUTCOMES = "outcomes.jsonl"  # file in the folder of an evaluation
_HINT = (
    "evaluate both on the same data, split and task; where the questions differ, a picture's examples need "
    "different right answers"
)


class _Key(NamedTuple):
    """Identifies an example independently of its question."""

    digest: str  # of its picture; "" without a picture
    part: str
    answers: tuple[str, ...]  # the right answers


class _Pairs(NamedTuple):
    """The same examples of two evaluations, in the same order."""

    first: list[Outcome]
    second: list[Outcome]
    questions: list[tuple[str, str]]  # pairs of questions, if they differ, without repetitions


def read_against(path: str, *, out: str) -> SavedOutcomes:
    """The outcomes in the folder `path` of an evaluation. Raises UsageError, also if it is the folder `out`."""
    folder = Path(path)
    if folder.resolve() == Path(out).resolve():
        raise UsageError("--against and --out are the same folder", hint="name another folder as --out")
    if not (folder / OUTCOMES).is_file():
        raise UsageError(
            f"Wanted the folder of a finished evaluation, but `{shown_name(path)}` has no {OUTCOMES}",
            hint="evaluate the other model first: `llama-adapter eval DATA --out FOLDER`",
        )
    return read_outcomes(folder / OUTCOMES)


def check_against(against: SavedOutcomes, data: EvaluationData, *, question: str | None, path: str) -> None:
    """Raise UsageError if the evaluation and the data have no example in common. Called before a model is loaded."""
    if against.task != data.task:
        raise UsageError(
            f"Wanted answers of the task {data.task} in `{shown_name(path)}`, got those of {against.task}", hint=_HINT
        )
    ours = [_Key(example.digest, example.part, example.answers) for example in data.examples]
    theirs = [_key(one) for one in against.outcomes]
    asked = [question_of(example, question=question) for example in data.examples]
    # Examples without a question get the model's caption prompt, which is not known before the model is loaded.
    is_known = not any(one.is_caption for one in asked)
    shown = {(key, one.shown("") if is_known else "") for key, one in zip(ours, asked, strict=True)}
    others = {(key, one.question if is_known else "") for key, one in zip(theirs, against.outcomes, strict=True)}
    if shown.isdisjoint(others) and _lone(ours).isdisjoint(_lone(theirs)):
        _refuse(path)


def compare_with(
    against: SavedOutcomes, own: SavedOutcomes, *, path: str, out: str, draws: Draws, quiet: bool = False
) -> Comparison:
    """The scores of the evaluation in `out` minus those in `path`, on the examples that both have.

    Unless `quiet`, prints on stderr how many answers are not compared. Raises UsageError if no example is in both.
    """
    pairs = _paired(against.outcomes, own.outcomes)
    num_left_out = len(against.outcomes) + len(own.outcomes) - 2 * len(pairs.first)
    if not pairs.first:
        _refuse(path)
    if num_left_out and not quiet:
        say(f"note: {num_left_out:,} answers to examples that one of the two lacks are not compared")
    names = (against.model, own.model)
    if against.model == own.model:
        names = (Path(path).resolve().name, Path(out).resolve().name)
    note = _note(pairs.questions, names=names)
    return compare(pairs.first, pairs.second, names=names, task=own.task, draws=draws, note=note)


def _refuse(path: str) -> NoReturn:
    raise UsageError(
        f"Wanted the same pictures with the same right answers in `{shown_name(path)}`, but no example is in both",
        hint=_HINT,
    )


def _paired(first: Sequence[Outcome], second: Sequence[Outcome]) -> _Pairs:
    """The examples that both have, including the question. If there are none, questions may differ.

    Then examples are the same if their pictures, parts and right answers are the same. If several examples of a picture
    have the same right answers, they are left out.
    """
    waiting: dict[tuple[object, ...], list[Outcome]] = {}  # the last one comes first
    for one in reversed(second):
        waiting.setdefault(one.example_key, []).append(one)
    same = [(one, others.pop()) for one in first if (others := waiting.get(one.example_key))]
    if same:
        return _Pairs([one for one, _ in same], [other for _, other in same], [])
    keys = _lone(map(_key, first)) & _lone(map(_key, second))
    of_key = {_key(one): one for one in second}
    pairs = [(one, of_key[_key(one)]) for one in first if _key(one) in keys]
    return _Pairs(
        [replace(one, question=other.question) for one, other in pairs],
        [other for _, other in pairs],
        list(dict.fromkeys((one.question, other.question) for one, other in pairs)),
    )


def _key(one: Outcome) -> _Key:
    return _Key(one.digest, one.part, one.references)


def _lone(keys: Iterable[_Key]) -> set[_Key]:
    """The keys that occur once and have a picture."""
    return {key for key, count in Counter(keys).items() if count == 1 and key.digest}


def _note(questions: Sequence[tuple[str, str]], *, names: tuple[str, str]) -> str:
    """A sentence on the questions of both evaluations, if they differ."""
    if not questions:
        return ""
    one, other = (f"{name} was asked “{shown_excerpt(text)}”" for name, text in zip(names, questions[0], strict=True))
    if len(questions) == 1:
        return f"The questions differ: {one}, {other}."
    return f"The questions differ in {len(questions):,} ways, such as: {one}, {other}."
