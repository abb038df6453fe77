"""Measures what 8-bit weights cost the embedded model, and writes docs/int8.json and docs/int8.md of it.

Usage: python -m scripts.int8_report [--pictures N] [--outliers SIZE] [--page-only]
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.measuring.circumstances import circumstances, load_average
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.vision.image import PictureSource
from scripts.int8_measures import draw_exams, measure_variants, outlier_error, require_kernels

DOCS = Path(__file__).resolve().parents[1] / "docs"
_SEED = 3  # of the exams: no other page uses these pictures
_SUFFIXES = (".png", ".jpg")
Result = Mapping[str, Any]

INTRODUCTION = """\
# 8-bit weights

`llama-adapter quantize` rounds the weights of all linear layers to int8, each output channel with the scale of its
largest weight over 127. On a CPU with the kernels, activations are rounded too, for every row by itself and for every
128 input features by themselves, products are summed exactly, and groups in float32. So a row's numbers do not depend
on its batch, and an outlier costs precision in its own group only. Embeddings, norms, biases, the patch convolution,
attention and the cache stay as they are.

This page is made by `python -m scripts.int8_report`, which measures the embedded model in float32 and with 8 bits in
the decoder, in the encoder, and in both. All through the product: answers by its `Captioner`, logits by its modules as
the CPU prepares them.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; raises DeviceError on a machine that does not compute in 8 bits."""
    parser = argparse.ArgumentParser(prog="python -m scripts.int8_report", description=__doc__)
    parser.add_argument("--pictures", type=int, default=500, help="fresh pictures of each kind (default: %(default)s)")
    parser.add_argument("--outliers", default="160M", help="random decoder to plant them in (default: %(default)s)")
    parser.add_argument("--page-only", action="store_true", help="write the page of the figures that are there")
    options = parser.parse_args(arguments)
    figures = DOCS / "int8.json"
    if not options.page_only:
        result = measure(num_pictures=options.pictures, outliers=options.outliers)
        figures.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = as_markdown(json.loads(figures.read_text(encoding="utf-8")))
    (DOCS / "int8.md").write_text(page, encoding="utf-8")
    return 0


def measure(*, num_pictures: int, outliers: str) -> dict[str, Any]:
    """All figures as plain values."""
    require_kernels()
    load_before = load_average()
    samples = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in _SUFFIXES)
    exams = draw_exams(num_pictures=num_pictures, seed=_SEED)
    pictures: dict[str, Sequence[PictureSource]] = {
        "samples": samples,
        "drawings": exams["plain"].pictures,
        "pairs": exams["never_drawn_pairs"].pictures,
    }
    variants = measure_variants(pictures, exams, tell=lambda line: print(line, file=sys.stderr))
    return {
        "pictures": {name: len(files) for name, files in pictures.items()},
        "asked": {name: len(exam.questions) for name, exam in exams.items()},
        "variants": variants,
        "bytes": _bundle_bytes(),
        "outliers": {"size": outliers, **outlier_error(outliers)},
        "circumstances": circumstances(load_before=load_before),
    }


def _bundle_bytes() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        made = quantise_bundle(QuantiseJob(out=str(Path(scratch) / "bundle")))
        return {
            name: sum(file.stat().st_size for file in place.glob("*.safetensors"))
            for name, place in (("float16", embedded_model()), ("int8", made))
        }


def as_markdown(result: Result) -> str:
    """The page."""
    lines = [INTRODUCTION, *_agreement(result), "", *_scores(result), "", *_logits(result), "", *_rows(result), ""]
    lines += [*_outliers(result), "", *_size(result), "", *_circumstances(result)]
    return "\n".join(lines) + "\n"


def _agreement(result: Result) -> list[str]:
    counts = result["pictures"]
    lines = [
        "## Captions",
        "",
        f"Greedy captions against those of float32: of the {counts['samples']} sample pictures, of "
        f"{counts['drawings']} fresh drawings, and of {counts['pairs']} with a pair of shape and colour that no "
        "training picture had. The "
        "share of captions that are the same to the last token, and of tokens that are.",
        "",
        f"| variant |{''.join(f' {what}, {name} |' for what in ('captions', 'tokens') for name in counts)}",
        f"| --- |{' ---: |' * 2 * len(counts)}",
    ]
    for variant in result["variants"]:
        shares = [f"{variant['agreement'][name][what]:.2%}" for what in ("captions", "tokens") for name in counts]
        lines.append(f"| {variant['name']} | {' | '.join(shares)} |")
    return lines


def _scores(result: Result) -> list[str]:
    asked, variants = result["asked"], result["variants"]
    names = [variant["name"] for variant in variants]
    lines = [
        "## Scores",
        "",
        f"Exactly right answers in percent, of {asked['plain']:,} questions about fresh drawings and "
        f"{asked['never_drawn_pairs']:,} about drawings with a pair of shape and colour that no training picture had "
        "(second figure).",
        "",
        f"| task | {' | '.join(names)} |",
        f"| --- |{' ---: |' * len(names)}",
    ]
    for task in variants[0]["scores"]["plain"]:
        cells = [
            f"{variant['scores']['plain'][task]:.1f}, {variant['scores']['never_drawn_pairs'][task]:.1f}"
            for variant in variants
        ]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return lines


def _logits(result: Result) -> list[str]:
    lines = [
        "## Logits",
        "",
        "At every place of float32's own captions of the drawings, which all variants are given. Errors are in the "
        "logits' unit; beside them the standard deviation of float32's logits. `same best` is the share of places with "
        "the same likeliest token. The visual query's error is relative, by its norm.",
        "",
        "| variant | largest error | mean error | logits' deviation | relative error | same best | visual query |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for variant in result["variants"][1:]:
        one, visual = variant["logits"]["drawings"], variant["visual_query_error"]["drawings"]
        lines.append(
            f"| {variant['name']} | {one['max_error']:.3f} | {one['mean_error']:.4f} | {one['std']:.2f} "
            f"| {one['relative_error']:.4f} | {one['same_best']:.2%} | {visual:.4f} |"
        )
    return lines


def _rows(result: Result) -> list[str]:
    lines = [
        "## A row alone and in a batch",
        "",
        "Every linear layer's output in one pass over all samples, bit by bit against each row computed alone; and the "
        "samples' captions at batch size 1 against those at 16.",
        "",
        "| variant | layer calls | with a bit that differs | captions the same |",
        "| --- | ---: | ---: | ---: |",
    ]
    for variant in result["variants"]:
        rows, same = variant["rows"], variant["same_alone"]["captions"]
        lines.append(f"| {variant['name']} | {rows['layer_calls']} | {rows['unequal']} | {same:.0%} |")
    return lines


def _outliers(result: Result) -> list[str]:
    outliers = result["outliers"]
    return [
        "## Outlier channels",
        "",
        f"A decoder of {outliers['size']} with random weights, its logits with 8 bits against float32: relative error "
        f"{outliers['plain']:.4f}; with one channel of every norm made 30 times as large {outliers['planted']:.4f}.",
        "",
        "Moving such factors from a norm into the weights behind it, as SmoothQuant does, is left out. The embedded "
        "model does not need it, and in front of queries, keys and values it would not be exact: the adapter's own "
        "queries pass through the same projection without the norm.",
    ]


def _size(result: Result) -> list[str]:
    sizes = result["bytes"]
    return [
        "## Size",
        "",
        f"The embedded model's weights take {sizes['float16'] / 1e6:.2f} MB in float16 and "
        f"{sizes['int8'] / 1e6:.2f} MB in int8, of which embeddings, positions and the patch convolution are "
        "float16 still.",
    ]


def _circumstances(result: Result) -> list[str]:
    facts = result["circumstances"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    return [f"{facts['cpu']}, {facts['threads']} of {facts['num_cpus']} CPUs; {versions}{commit}; {facts['time']}"]


if __name__ == "__main__":
    sys.exit(main())
