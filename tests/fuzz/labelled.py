"""Labelled data: nothing is lost in silence. Each picture and text is in an example, in a problem, or in the note."""

import json
import lzma
import os
import tarfile
import zlib
from pathlib import Path
from typing import Any, Final

from llama_adapter.app.learning.labelled.example import Examples
from llama_adapter.app.learning.labelled.pictures import METADATA
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.pictures.inputs.items import InputsError, LeftOut
from llama_adapter.app.pictures.inputs.xmp import description_of, with_description
from tests.app.pictures.inputs.files import tar_bytes
from tests.fuzz.mutators import either, flipped, mutated_bytes, mutated_json, mutated_tar, words
from tests.fuzz.target import Target, new_folder, refused, written

_MOST_FILES: Final = 40
_TEXT = "a <star> & \x0b \ufffe"
_KEPT = "a <star> & \ufffd \ufffd"


def xmp(data: bytes) -> str:
    """An .xmp is read, and changed in no place but that of its description."""
    try:
        text = description_of(data)
        changed = with_description(_TEXT, data)
    except ValueError as error:
        return refused(error, is_shown=False)
    assert description_of(changed) == _KEPT
    start = _num_equal(data, changed)
    end = _num_equal(data[start:][::-1], changed[start:][::-1])
    assert start + end == len(data) or b"description" in data[:start], "another place was changed"
    assert with_description(_TEXT, changed) == changed
    return f"ok {bool(text)} {len(changed) > len(data)}"


def _num_equal(one: bytes, other: bytes) -> int:
    """Number of equal bytes from the start."""
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def counted(left_out: LeftOut) -> int:
    return sum(number for number, _ in left_out._found.values())


def _outcome(found: Examples) -> str:
    assert all(example.answers for example in found.examples)
    kinds = sorted(found.left_out._found)
    return f"ok {min(len(found.examples), 5)} {min(len(found.problems), 5)} {kinds}"


def folder(data: bytes) -> str:
    """A folder with the files that an object names: their content is text. Its pictures and texts are all told of."""
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        return "ok: no object"
    place = new_folder("tree")
    pictures = _write(place, files) if isinstance(files, dict) else []
    try:
        found = read_examples(str(place), digests=False)
    except InputsError as error:
        return refused(error, is_shown=False)
    named = {os.path.abspath(str(one.item.source)) for one in found.examples}
    told = " ".join(f"{one.place} {one.reason}" for one in found.problems)
    lost = [path for path in pictures if str(path) not in named and str(path) not in told]
    assert len(lost) <= counted(found.left_out) + _uncounted(found), f"lost in silence: {lost}"
    return _outcome(found)


def _uncounted(found: Examples) -> int:
    """Pictures outside the folders of classes: an error has their number. A class that cannot be used is an error."""
    return _MOST_FILES if any(not one.is_warning for one in found.problems) else 0


def _write(place: Path, files: dict[str, Any]) -> list[Path]:
    """Write files below the folder; returns the pictures among them."""
    pictures = []
    for name, content in list(files.items())[:_MOST_FILES]:
        parts = [part for part in name.replace("\0", "").split("/") if part not in ("", ".", "..")][:4]
        path = place.joinpath(*parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        except (OSError, ValueError):  # a folder of this name, a name that is too long
            continue
        is_hidden = any(part.startswith((".", "@", "#")) for part in parts)
        if path.suffix.lower() in (".png", ".jpg") and not is_hidden and path.name not in METADATA:
            pictures.append(path)
    return pictures


def samples(data: bytes) -> str:
    """An archive of samples as labelled data."""
    path = str(written("samples.tar", data))
    try:
        found = read_examples(path, digests=False, looks=False)
    except InputsError as error:
        return refused(error, is_shown=False)
    told = " ".join(f"{one.place} {one.reason}" for one in found.problems)
    named = {one.item.label for one in found.examples}
    lost = [name for name in _pictures_in(path) if f"{path}/{name}" not in named and name not in told]
    lost = [] if any(one.place == path for one in found.problems) else lost  # the archive is damaged
    assert len(lost) <= counted(found.left_out), f"lost in silence: {lost}"
    return _outcome(found)


def _pictures_in(path: str) -> list[str]:
    """The names of pictures in an archive, as Python reads it; none in one that Python does not read to its end."""
    try:
        with tarfile.open(path) as archive:
            names = [member.name for member in archive.getmembers() if member.isfile()]
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError, zlib.error, lzma.LZMAError):
        return []
    is_plain = all(name.isprintable() and "/" not in name[:1] and ".." not in name for name in names)
    is_hidden = any(part.startswith((".", "@", "#", "__")) for name in names for part in name.split("/"))
    pictures = [name for name in names if name.lower().endswith((".png", ".jpg"))]
    return pictures if is_plain and not is_hidden else []


def _trees() -> dict[str, bytes]:
    row = {"file_name": "a.png", "text": "a star"}
    texts = {"a.png": "p", "a.txt": "a star\nred", "b.jpg": "q", "sub/c.png": "r", "sub/c.caption": "x", "d.txt": "y"}
    trees: dict[str, dict[str, Any]] = {
        "texts": texts,
        "stems": {"a.jpg": "1", "a.png": "2", "A.PNG": "3", "a.txt": "x", "a.png.txt": "y", "A.PNG.xmp": "<x/>"},
        "json": {"a.png": "p", "a.json": {"question": "What?", "answer": "a star"}, "b.png": "q", "b.json": {}},
        "kohya": {"10_dog/a.png": "p", "10_dog/a.txt": "dog", "metadata.json": {"10_dog/a": {"caption": "z"}}},
        "classes": {"red/a.png": "p", "blue/b.png": "q", "blue/c.txt.png": "r"},
        "splits": {"train/red/a.png": "p", "test/red/b.png": "q", "train/blue/c.png": "r"},
        "rows": {"a.png": "p", "b.png": "q", "metadata.jsonl": json.dumps(row)},
        "nas": {"a.png": "p", "a.txt": "x", "@eaDir/a.png/t.jpg": "t"},
    }
    return {name: json.dumps(tree).encode() for name, tree in trees.items()}


def _archives() -> dict[str, bytes]:
    pictures = {"s/1.png": b"p" * 600, "s/1.json": b'{"text": "a star"}', "s/2.jpg": b"q", "s/2.txt": b"one\ntwo"}
    more = {"s/3.seg.png": b"m", "s/3.png": b"r", "s/3.cls": b"4", "s/4.png": b"s", "5.txt": b"x", "s/1.jpg": b"t"}
    return {"plain": tar_bytes(pictures), "more": tar_bytes(pictures | more), "gzip": tar_bytes(more, mode="w:gz")}


_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_XMP = (
    f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{_RDF}"><rdf:Description rdf:about="" '
    'xmlns:dc="http://purl.org/dc/elements/1.1/">{}</rdf:Description></rdf:RDF></x:xmpmeta>'
)
_XMP_WORDS = (
    *(b"<rdf:li/>", b"<rdf:Alt>", b"</rdf:Alt>", b"<dc:description>", b"</dc:description>", b"<dc:description/>"),
    *(b"<rdf:RDF>", b"</rdf:RDF>", b'xml:lang="x-default"', b'dc:description="a"', b">", b"<!--", b"-->", b"<![CDATA["),
    *(b"]]>", b"&amp;", b"&#0;", b"<?x ?>", b"'", b'"', b"<!DOCTYPE a>", b"\xff"),
)


_TREE_WORDS = (
    *words("a.png b.jpg a.txt b.json a.json metadata.csv c/ red/ train/ .hid @eaDir/ A.PNG a.png.xmp x.tar"),
    *(*words("text caption answer label question"), {"text": "x"}, [1]),
)
_LANGUAGES = '<dc:description><rdf:Alt><rdf:li xml:lang="x-default">a</rdf:li></rdf:Alt></dc:description>'


def _xmps() -> dict[str, bytes]:
    return {
        "new": with_description("a star", None),
        "alt": _XMP.format(_LANGUAGES).encode(),
        "none": _XMP.format("<dc:subject><rdf:Bag><rdf:li>tag</rdf:li></rdf:Bag></dc:subject>").encode(),
        "plain": _XMP.format("<dc:description>a &gt; b</dc:description>").encode(),
    }


TARGETS = (
    Target("xmp", xmp, _xmps, either(flipped, mutated_bytes(*_XMP_WORDS))),
    Target("folder", folder, _trees, mutated_json(*_TREE_WORDS)),
    Target("samples", samples, _archives, either(mutated_tar, mutated_bytes())),
)
