"""Rewrites the tables of docs/embedded-model.md from docs/embedded-model.json. Measures nothing.

Usage: python -m scripts.train_embedded.card [--scores NAME=FILE ...] [--familiar FILE] [--figures FILE] [--page FILE]

A table stands between `<!-- part: NAME -->` and `<!-- end -->`; one that has no figures yet is left as it is.
`--scores` first puts in what `python -m scripts.train_embedded.score --json FILE` wrote: NAME is float32, int8, or an
arm of the ablation, such as ablation-frozen. `--familiar` puts in a table of heads and rows.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.runtime.atomic_write import atomic_write
from scripts.train_embedded.curves import ARM, PAIRS, STAGES, VARIANT
from scripts.train_embedded.results import DOCS, PLACE, put, read, take

Figures = Mapping[str, Any]

TYPES = ("float32", "int8")
BEGIN, END = "<!-- part: ", "<!-- end -->"
PART = re.compile(rf"{BEGIN}(?P<name>\S+) -->\n(?:(?!{BEGIN}).)*?{END}", re.DOTALL)


def fill(page: str, content: Figures) -> str:
    """The page with the tables of all parts that `content` has.

    Raises ValueError for a part that is unknown, without an end, there twice or missing, and for a missing figure.
    """
    found = [match["name"] for match in PART.finditer(page)]
    if not len(found) == page.count(BEGIN) == page.count(END):
        raise ValueError(
            f"Wanted `{END}` after each `{BEGIN}NAME -->`, got {page.count(BEGIN)} beginnings and {page.count(END)} "
            f"ends on the page; whole are {', '.join(found) or 'none'}"
        )
    if wrong := [name for name in found if name not in PARTS or found.count(name) > 1]:
        raise ValueError(f"Wanted each of the parts {', '.join(PARTS)} once, got {', '.join(wrong)} on the page")
    if missing := [name for name in PARTS if content.get(name) and name not in found]:
        raise ValueError(f"There are figures for {', '.join(missing)}, and the page has no `{BEGIN}{missing[0]} -->`")
    return PART.sub(lambda match: _filled(match, content), page)


def _filled(match: re.Match[str], content: Figures) -> str:
    name = match["name"]
    if not content.get(name):
        return match[0]
    return "\n".join([f"{BEGIN}{name} -->", "", *PARTS[name](content), "", END])


def put_scores(path: Path, name: str, result: Figures) -> None:
    """Put the result of score.py under `name`: float32, int8, or an arm of the ablation. Raises ValueError."""
    if name in TYPES:
        put(path, "scores", name, value=result)
    elif name.startswith(ARM):
        for key in ("scores", "never_drawn_pairs"):
            put(path, "ablation", name, key, value=take(result, key))
    else:
        raise ValueError(f"--scores takes {', '.join(TYPES)} or {ARM}NAME, got `{name}`")


def _scores(content: Figures) -> Iterator[str]:
    exact = take(content, "scores", "float32")
    types = [name for name in TYPES if name in content["scores"]]
    for name in types:
        for key in ("seed", "asked"):
            if take(content, "scores", name, key) != take(content, "scores", "float32", key):
                raise ValueError(
                    f"{name} and float32 were not asked the same, `{key}` differs: score both again, alike"
                )
    columns = [("scores", name) for name in types] + [("never_drawn_pairs", name) for name in types]
    columns += [("shuffled_pictures", "float32"), ("most_frequent_answer", "float32")]
    own, pairs = ["exact match"], ["never-drawn pairs"]
    if len(types) > 1:
        own, pairs = types, [f"never-drawn pairs, {name}" for name in types]
    rows = (
        (task, asked, *(f"{take(content, 'scores', name, key, task):.1f}" for key, name in columns))
        for task, asked in take(exact, "asked").items()
    )
    yield from _table(("task", "asked", *own, *pairs, "shuffled pictures", "most frequent answer"), rows)


def _training(content: Figures) -> Iterator[str]:
    others = [name for name in content["training"] if name not in STAGES and not name.startswith((ARM, VARIANT))]
    stages = [*(name for name in STAGES if name in content["training"]), *others]
    rows = ((name, _steps(content, name), f"{take(content, 'training', name, 'minutes'):.1f}") for name in stages)
    yield from _table(("stage", "steps", "processor minutes"), rows)


def _steps(content: Figures, name: str) -> str:
    """How many, and of how many where the stage did not come to its end."""
    steps, wanted = (take(content, "training", name, key) for key in ("steps", "num_steps"))
    return f"{steps:,}" if steps == wanted else f"{steps:,} of {wanted:,}"


def _ablation(content: Figures) -> Iterator[str]:
    arms = list(content["ablation"])

    def figure(arm: str, *keys: str) -> Any:
        return take(content, "ablation", arm, *keys)

    names = [arm.removeprefix(ARM) for arm in arms]
    yield from _table(
        (
            "arm",
            "trained of the LLaMA besides adapter, norms and biases",
            "trained weights",
            "together",
            "steps",
            "processor minutes",
        ),
        (
            (
                name,
                figure(arm, "trained"),
                ", ".join(f"{part} {count:,}" for part, count in _parts(figure(arm, "weights"))),
                f"{figure(arm, 'weights', 'all_trained'):,} of {figure(arm, 'weights', 'all'):,}",
                _steps(content, arm),
                f"{take(content, 'training', arm, 'minutes'):.1f}",
            )
            for arm, name in zip(arms, names, strict=True)
        ),
    )
    yield ""
    tasks = list(figure(arms[0], "scores"))
    heads = [head for name in names for head in (name, f"{name}, never-drawn pairs")]
    columns = [(arm, key) for arm in arms for key in ("scores", "never_drawn_pairs")]
    means = [sum(figure(arm, key, task) for task in tasks) / len(tasks) for arm, key in columns]
    yield from _table(
        ("task", *heads),
        [
            *((task, *(f"{figure(arm, key, task):.1f}" for arm, key in columns)) for task in tasks),
            ("mean", *(f"{mean:.1f}" for mean in means)),
        ],
    )


def _variants(content: Figures) -> Iterator[str]:
    variants = content["variants"]
    tasks = list(next(iter(variants.values())))
    yield from _table(
        ("task", *(name.removeprefix(VARIANT).replace("-", " ") for name in variants)),
        [
            (
                task.replace(PAIRS, "never-drawn pairs: "),
                *(f"{100 * take(content, 'variants', name, task):.1f}" for name in variants),
            )
            for task in tasks
        ],
    )


def _parts(weights: Mapping[str, int]) -> list[tuple[str, int]]:
    """What is trained at all, part by part."""
    return [(name.replace("_", " "), count) for name, count in weights.items() if count and not name.startswith("all")]


def _familiar(content: Figures) -> Iterator[str]:
    heads = take(content, "familiar", "heads")
    rows = take(content, "familiar", "rows")
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"Wanted {len(heads)} cells in each row of `familiar.rows`, as heads has, got {row}")
    yield from _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_cell, heads))} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("|", r"\|")


PARTS: dict[str, Callable[[Figures], Iterator[str]]] = {
    "scores": _scores,
    "training": _training,
    "ablation": _ablation,
    "variants": _variants,
    "familiar": _familiar,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: writes the page, and the file of figures where something is put into it."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_embedded.card", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument(
        "--scores", action="append", default=[], metavar="NAME=FILE", help="put in what score.py --json wrote"
    )
    parser.add_argument("--familiar", type=Path, metavar="FILE", help="put in a table, an object with heads and rows")
    parser.add_argument("--figures", type=Path, default=PLACE, help="the file of figures (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=DOCS / "embedded-model.md", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        for given in options.scores:
            name, separator, file = given.partition("=")
            if not separator:
                raise ValueError(f"--scores wants NAME=FILE, got `{given}`")
            put_scores(options.figures, name, read(Path(file)))
        if options.familiar is not None:
            put(options.figures, "familiar", value=read(options.familiar))
        page = fill(options.page.read_text(encoding="utf-8"), read(options.figures))
        with atomic_write(options.page) as stream:
            stream.write(page.encode())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
