"""Six small sets of pictures in ten classes, as people have them: made by a function of a seed, and written as folders.

The same seed gives the same pictures, and the first pictures of a class do not depend on the number of pictures.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from scripts.own_pictures.drawn_pages import PAGES, draw_page
from scripts.own_pictures.drawn_tools import TOOLS, between, draw_tool
from scripts.own_pictures.scans import MOST_INK, load_scans

PER_CLASS = 60  # pictures of each of the ten classes
HELD_OUT = 20  # of them are not learned
# Ten photographs of scikit-image, and those of them that are backgrounds.
PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "coffee.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "rocket.jpg",
)
BACKGROUNDS = tuple(
    name for name in PHOTOGRAPHS if name.partition(".")[0] not in ("camera", "hubble_deep_field", "ihc")
)
CHARACTERS = "ABEGKMRS38"
# Of matplotlib's fonts, those with letters.
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-BoldOblique", "-Oblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-BoldItalic", "-Italic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "BolIta", "Italic")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
_BICUBIC = Image.Resampling.BICUBIC
_DIGIT_SIDE, _CROP_SIDE, _CHARACTER_SIDE, _TOOL_SIDE = 64, 96, 96, 128  # of the pictures, in pixels

Labelled = tuple[Image.Image, str]  # a picture and its class
Maker = Callable[[int, int], list[Labelled]]  # seed, pictures per class -> pictures


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The pictures of a folder of classes, in order of classes and file names."""

    classes: tuple[str, ...]
    pictures: tuple[Image.Image, ...]
    labels_N: NDArray[np.int64]  # indices of `classes`


def digits(seed: int, each: int) -> list[Labelled]:
    """Scans of handwritten digits of 8 x 8 pixels, enlarged."""
    scans = load_scans()
    found = []
    for digit, rng in _classes("0123456789", seed):
        for index in rng.permutation(np.flatnonzero(scans.digits_N == int(digit)))[:each]:
            paper_HW = np.rint(255 - scans.ink_NHW[index] * (255 / MOST_INK)).astype(np.uint8)
            cover = Image.fromarray(paper_HW).resize((_DIGIT_SIDE, _DIGIT_SIDE), _BICUBIC)
            found.append((cover.convert("RGB"), digit))
    return found


def crop(name: str, rng: np.random.Generator) -> Image.Image:
    """A detail of a photograph, turned and in another light."""
    whole = photograph(name)
    shorter = min(whole.size)
    side = between(rng, shorter // 4, shorter // 2)
    turned = _square(whole, side, rng).rotate(rng.uniform(-20, 20), resample=_BICUBIC)
    light = ImageEnhance.Brightness(turned).enhance(rng.uniform(0.6, 1.4))
    contrast = ImageEnhance.Contrast(light).enhance(rng.uniform(0.7, 1.3))
    edge = side // 6  # without the black corners that turning leaves
    inner = contrast.crop((edge, edge, side - edge, side - edge))
    return inner.resize((_CROP_SIDE, _CROP_SIDE), _BICUBIC)


def character(letter: str, rng: np.random.Generator) -> Image.Image:
    """A printed character in one of 21 fonts, turned and with noise."""
    paper, ink = between(rng, 150, 255), between(rng, 0, 90)
    image = Image.new("L", (_CHARACTER_SIDE, _CHARACTER_SIDE), paper)
    place = (_CHARACTER_SIDE // 2 + between(rng, -12, 12), _CHARACTER_SIDE // 2 + between(rng, -12, 12))
    font = _font(FONTS[rng.integers(len(FONTS))], between(rng, 40, 72))
    ImageDraw.Draw(image).text(place, letter, font=font, fill=ink, anchor="mm")
    turned = image.rotate(rng.uniform(-15, 15), fillcolor=paper, resample=_BICUBIC)
    noisy = _with_noise(turned, rng.uniform(5, 35), rng)
    return _blurred(noisy, rng.uniform(0, 1.2)).convert("RGB")


def tool_in_place(kind: str, rng: np.random.Generator) -> Image.Image:
    """The drawing of a tool in front of a photograph, in any size, colour and angle."""
    behind = photograph(BACKGROUNDS[rng.integers(len(BACKGROUNDS))])
    ground = _square(behind, between(rng, 150, min(behind.size)), rng).resize((_TOOL_SIDE,) * 2, _BICUBIC)
    ground = ImageEnhance.Brightness(ground).enhance(rng.uniform(0.5, 1.3))
    tool = draw_tool(kind, rng).rotate(rng.uniform(-40, 40), resample=_BICUBIC)
    tool = ImageOps.mirror(tool) if rng.random() < 0.5 else tool
    side = between(rng, 76, 118)
    tool = tool.resize((side, side), _BICUBIC)
    ground.paste(tool, (between(rng, 0, _TOOL_SIDE - side), between(rng, 0, _TOOL_SIDE - side)), tool)
    return ground


def scanned_page(kind: str, rng: np.random.Generator) -> Image.Image:
    """A page or stamp, with the turns, blur, light and noise of a scanner."""
    turned = draw_page(kind, rng).rotate(rng.uniform(-6, 6), fillcolor=200, resample=_BICUBIC)
    scale = rng.uniform(0.85, 1.1)
    sized = turned.resize((int(turned.width * scale), int(turned.height * scale)), _BICUBIC)
    light = ImageEnhance.Brightness(_blurred(sized, rng.uniform(0, 1.3))).enhance(rng.uniform(0.75, 1.05))
    return _with_noise(light, rng.uniform(4, 22), rng).convert("RGB")


def signs(folder: Path, seed: int, each: int) -> list[Labelled]:
    """Photographs of hands that sign digits, from `folder` with a sub-folder of pictures for each digit.

    They are the Sign Language Digits Dataset by Turkey Ankara Ayranci Anadolu High School (Apache License 2.0; Mavi,
    2020, arXiv:2011.08927). Raises FileNotFoundError if there is no folder of a digit.
    """
    found = []
    for digit, rng in _classes("0123456789", seed):
        names = sorted(path for path in (folder / digit).iterdir() if path.is_file())
        for index in rng.permutation(len(names))[:each]:
            with Image.open(names[index]) as image:
                found.append((image.convert("RGB"), digit))
    return found


def drawn(names: Collection[str], draw: Callable[[str, np.random.Generator], Image.Image]) -> Maker:
    """A set of pictures that are drawn one by one; the class of a file is its name without the suffix."""
    return lambda seed, each: [
        (draw(name, rng), name.partition(".")[0]) for name, rng in _classes(names, seed) for _ in range(each)
    ]


def sets_of(signs_folder: Path | None) -> Mapping[str, Maker]:
    """The sets by name. `signs` is one of them if its folder is given."""
    made: dict[str, Maker] = {
        "digits": digits,
        "crops": drawn(PHOTOGRAPHS, crop),
        "characters": drawn(CHARACTERS, character),
        "tools": drawn(TOOLS, tool_in_place),
        "pages": drawn(PAGES, scanned_page),
    }
    return made if signs_folder is None else {"signs": partial(signs, signs_folder), **made}


def write_set(folder: Path, draw: Callable[[], Sequence[Labelled]], *, held_out: int = HELD_OUT) -> None:
    """Write the first `held_out` pictures of a class as FOLDER/held/CLASS/000.png, and the others in FOLDER/learn.

    A finished folder is left as it is.
    """
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    counts = Counter[str]()
    for picture, name in draw():
        number = counts[name]
        counts[name] += 1
        split, place = ("held", number) if number < held_out else ("learn", number - held_out)
        path = unfinished / split / name / f"{place:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    unfinished.rename(folder)


def fewer(learn: Path, each: int) -> Path:
    """A copy of a folder of classes with the first `each` pictures of each class, beside it."""
    folder = learn.with_name(f"{learn.name}-{each}")
    for path in sorted(learn.glob("*/*.png")):
        if int(path.stem) < each:
            (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.parent.name / path.name)
    return folder


def read_part(folder: Path) -> Part:
    """The pictures of FOLDER/CLASS/NAME. Raises OSError."""
    paths = sorted(folder.glob("*/*"))
    classes = sorted({path.parent.name for path in paths})
    pictures = []
    for path in paths:
        with Image.open(path) as image:
            pictures.append(image.convert("RGB"))
    labels_N = np.array([classes.index(path.parent.name) for path in paths], dtype=np.int64)
    return Part(classes=tuple(classes), pictures=tuple(pictures), labels_N=labels_N)


@lru_cache
def photograph(name: str) -> Image.Image:
    """One of the photographs that are part of scikit-image."""
    with (files("skimage") / "data" / name).open("rb") as file:
        return Image.open(file).convert("RGB")


def _classes(names: Collection[str], seed: int) -> Iterator[tuple[str, np.random.Generator]]:
    """Each class with a random generator of its own."""
    for number, name in enumerate(names):
        yield name, np.random.default_rng([seed, number])


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", size)


def _square(image: Image.Image, side: int, rng: np.random.Generator) -> Image.Image:
    """A random detail of `side` x `side` pixels."""
    x, y = between(rng, 0, image.width - side), between(rng, 0, image.height - side)
    return image.crop((x, y, x + side, y + side))


def _blurred(image: Image.Image, radius: float) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius))


def _with_noise(image: Image.Image, deviation: float, rng: np.random.Generator) -> Image.Image:
    """A grey picture with Gaussian noise."""
    noisy_HW = np.asarray(image, dtype=np.float64) + rng.normal(0, deviation, (image.height, image.width))
    return Image.fromarray(np.clip(noisy_HW, 0, 255).astype(np.uint8))
