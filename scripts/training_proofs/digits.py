"""scikit-learn's scans of handwritten digits as labelled pictures: how they are drawn, split, and listed in tables.

The scans are the test part of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998).
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from scripts.train_embedded.world import COLORS

# N scans of 8 x 8 pixels

Ints = NDArray[np.int64]

QUESTION = "Which digit is this?"
CHOICES = tuple("0123456789")
# Names for the digits, as a control: words that the embedded model already uses in answers.
KNOWN_WORDS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black", "star", "moon")
SIDE = 224  # of a picture, in pixels: one pixel of the scan is one patch of the embedded model's tower
GROUND = np.array([128, 128, 128])  # a mid-tone, as in the pictures that the tower was trained on
INK = np.array(COLORS["yellow"])  # yellow on grey gave a better score on a validation part than white or black
MOST_INK = 16  # of a pixel in a scan
HELD_OUT_SEED = 1998


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scans:
    """Scans and the digits that they show."""

    ink_NHW: NDArray[np.float64]  # (N, 8, 8), 0 to 16
    digits_N: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Division:
    """Indices of scans. `train` alternates between the digits, so that its first 10 n scans have n of each digit."""

    train: Ints
    validation: Ints
    held_out: Ints


def load_scans() -> Scans:
    """The 1,797 scans included in scikit-learn."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return Scans(ink_NHW=loaded.images, digits_N=loaded.target.astype(np.int64))


def divide(digits_N: Ints, *, seed: int, num_train: int = 100, num_validation: int = 20) -> Division:
    """Split the scans: `num_train` and `num_validation` of each digit, and the rest held out.

    The held-out scans are the same for all seeds, so settings chosen on a validation part never used them. Raises
    ValueError if a digit has too few scans.
    """
    wanted = num_train + num_validation
    train, validation, held_out = [], [], []
    for digit in range(len(CHOICES)):
        own = np.flatnonzero(digits_N == digit)
        if len(own) <= wanted:
            raise ValueError(f"Wanted more than {wanted} scans of the digit {digit}, got {len(own)}")
        shuffled = np.random.default_rng([HELD_OUT_SEED, digit]).permutation(own)
        held_out.append(np.sort(shuffled[wanted:]))
        free = np.random.default_rng([seed, digit]).permutation(shuffled[:wanted])
        train.append(free[:num_train])
        validation.append(free[num_train:])
    return Division(
        train=np.stack(train, axis=1).ravel(),
        validation=np.stack(validation, axis=1).ravel(),
        held_out=np.concatenate(held_out),
    )


def picture(ink_HW: NDArray[np.float64]) -> Image.Image:
    """A scan as a picture of 224 x 224 pixels: enlarged with bicubic interpolation, yellow ink on grey."""
    cover = Image.fromarray((ink_HW * (255 / MOST_INK)).round().astype(np.uint8))
    smooth = np.asarray(cover.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    return Image.fromarray((GROUND + (INK - GROUND) * smooth[..., None]).round().astype(np.uint8))


def write_digits(folder: Path, scans: Scans, division: Division, *, sizes: Sequence[int]) -> None:
    """Write the pictures as folders by class, and tables that list them.

    `folder/classes/SPLIT/DIGIT/INDEX.png` holds all pictures. `folder/digits-N.jsonl` lists the first N training scans
    of each digit and the complete other parts, with the ten digits as choices. `folder/words-N.jsonl` has `KNOWN_WORDS`
    in place of the digits.
    """
    parts = {"train": division.train, "val": division.validation, "test": division.held_out}
    classes = folder / "classes"
    shutil.rmtree(classes, ignore_errors=True)
    names = {}
    for split, indices in parts.items():
        for index in indices.tolist():
            digit = CHOICES[int(scans.digits_N[index])]
            names[index] = f"classes/{split}/{digit}/{index:04d}.png"
            path = folder / names[index]
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(scans.ink_NHW[index]).save(path)
    for size in sizes:
        for kind, words in (("digits", CHOICES), ("words", KNOWN_WORDS)):
            rows = [
                {
                    "picture": names[index],
                    "question": QUESTION,
                    "answer": words[int(scans.digits_N[index])],
                    "choices": list(words),
                    "split": split,
                }
                for split, indices in parts.items()
                for index in indices[: size * len(CHOICES) if split == "train" else None].tolist()
            ]
            write_table(folder / f"{kind}-{size}.jsonl", rows)


def write_table(path: Path, rows: Sequence[object]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
