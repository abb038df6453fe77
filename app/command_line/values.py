"""Converts texts of a command line to values, or raises a usage error."""

import argparse
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llama_adapter.app.models.sight import refuse_encoder, require_sight
from llama_adapter.app.models.spec import AUTO, BatchSize, CaptionerSpec
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted

if TYPE_CHECKING:
    from llama_adapter.runtime.settings.sources import Effective

T = TypeVar("T")
_QUOTED = r"""(?<!\w)(?:'[^']*'|"[^"]*")"""  # values in messages, such as names of files
_UNITS = {"mb": 10**6, "gb": 10**9, "mib": 1 << 20, "gib": 1 << 30}


def parse_text(text: str) -> str:
    """Text for the model; raises UsageError for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"Wanted text in UTF-8; character {error.start + 1} of {text!a} is not",
            hint="write UTF-8, in a UTF-8 locale: LC_ALL=C.UTF-8",
        ) from error
    return text


def value_of(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A `type` for argparse: the text's encoding is checked, and a ValueError becomes a usage error."""
    return functools.partial(_checked, parse)


def _checked(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(parse_text(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_band(text: str) -> tuple[float, float]:
    """`0.3,0.7` -> (0.3, 0.7)."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted two probabilities such as 0.3,0.7, got {text!r}") from None
    return low, high


def parse_shard(text: str) -> tuple[int, int]:
    """`0/4` -> (0, 4): the index of a part, counted from 0, and the number of parts."""
    try:
        part, parts = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"wanted I/N with I counted from 0, such as 0/4 to 3/4, got {text!r}"
        ) from None
    return part, parts


def parse_sample_fields(text: str) -> tuple[str, ...]:
    """`input,outputs` -> ("input", "outputs"): the fields of picture and text; the second may be missing."""
    fields = tuple(part.strip() for part in text.split(","))
    if len(fields) > 2 or not all(fields):
        raise argparse.ArgumentTypeError(f"wanted PICTURE or PICTURE,TEXT, such as input,outputs, got {text!r}")
    return fields


def read_json(text: str) -> str:
    """The content of a JSON file by its name. JSON text itself is taken too, as settings files repeat it."""
    if text.lstrip().startswith("{"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read `{text}`: {getattr(error, 'strerror', None) or error}") from None


def parse_batch_size(text: str) -> BatchSize:
    """`8` -> 8, `auto` -> "auto"."""
    if text.strip().lower() == AUTO:
        return AUTO
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number of at least 1, or {AUTO}, got {text!r}")
    return int(text)


def parse_encoder_device(text: str) -> int | str:
    """`1` -> 1, `npu:0` -> "npu:0"."""
    return int(text) if text.isdecimal() else text


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """`1,2,4` -> (1, 2, 4)."""
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"wanted whole numbers of at least 1 separated by commas, got {text!r}")
    return sizes


def parse_bytes(text: str) -> tuple[int, ...]:
    """`21GB,64GiB` -> (21000000000, 68719476736)."""
    found = [
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB)", part.strip(), re.IGNORECASE) for part in text.split(",")
    ]
    sizes = tuple(int(float(one[1]) * _UNITS[one[2].lower()]) for one in found if one is not None)
    if len(sizes) < len(found) or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"wanted sizes such as 21GB,64GiB, got {text!r}")
    return sizes


def spec_from(options: argparse.Namespace, *, sees_pictures: bool = True) -> CaptionerSpec:
    """The spec that the flags describe. Raises UsageError for flags that exclude each other.

    With `sees_pictures`, LLaMA without an adapter is an error too, as is an encoder beside one.
    """
    spec = settings(CaptionerSpec, vars(options))
    if sees_pictures:
        require_sight(spec)
    refuse_encoder(spec)
    return spec


def settings(kind: Callable[..., T], values: Mapping[str, Any], *, shown: Mapping[str, str] | None = None) -> T:
    """An instance of the dataclass `kind`, made from the values that are its fields; lists become tuples.

    A ValueError becomes a UsageError that names flags: a field's flag is its name, or the entry in `shown`. For a value
    from the environment or a file, the error names the variable, or the file and line.
    """
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    flags = {name: "--" + name.replace("_", "-") for name in fields} | dict(shown or {})
    with in_flags(flags, effective=values.get("effective", ())):
        given = {name: values[name] for name in fields if name in values}
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def require_folder(out: str) -> None:
    """Raise UsageError if `--out` is no folder and none can be made there."""
    if out == "-" or (os.path.lexists(out) and not os.path.isdir(out)):
        raise UsageError(f"--out names a folder, got `{out}`")


def refuse_without(needed: str, options: argparse.Namespace, *names: str) -> None:
    """Raise UsageError for the first of these flags that is given; the caller knows that the flag `needed` is not."""
    for name in names:
        value = getattr(options, name, None)
        if value is not None and value is not False and value not in ([], ()):
            raise UsageError(f"--{name.replace('_', '-')} goes with {needed}, which is missing")


@contextmanager
def in_flags(flags: Mapping[str, str], *, effective: "Iterable[Effective]" = ()) -> Iterator[None]:
    """Turns a ValueError into a UsageError that names flags, variables or places in files instead of fields.

    Its notes become the hint.
    """
    try:
        yield
    except ValueError as error:
        elsewhere = {one.setting.dest: one.name for one in effective if one.kind in ("variable", "file")}
        flags = {**flags, **elsewhere}
        names = "|".join(map(re.escape, flags))
        found, texts = rf"{_QUOTED}|(?<![\w-])(?:{names})\b", (str(error), "; ".join(getattr(error, "__notes__", ())))
        message, hint = (re.sub(found, lambda match: flags.get(match[0], match[0]), text) for text in texts)
        raise UsageError(message, hint=hint) from error


def holding_out(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The command with a lock on its --out: a second run with the same --out is refused before it computes anything.

    SIGTERM ends it as Ctrl-C does, so that it removes its unfinished files.
    """

    @functools.wraps(run)
    def locked(options: argparse.Namespace) -> int:
        with terminated_as_interrupted(), locked_output(options.out):
            return run(options)

    return locked
