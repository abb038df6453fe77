"""The HTML of the page: Jinja templates that escape every value, filters for names and numbers, texts of errors."""

import logging
import re
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from llama_adapter.app.jobs import progress
from llama_adapter.app.serving.online.types import ServiceError
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.text import counted

_log = logging.getLogger("llama_adapter")

# Control characters and characters that change the text direction: a file name must not affect the text next to it.
_INVISIBLE: Final = dict.fromkeys((*range(32), 127, *range(8234, 8239), *range(8294, 8298)), "\ufffd")
_IN_TEXT: Final = {code: shown for code, shown in _INVISIBLE.items() if chr(code) not in "\n\t"}


def render(template: str, macro: str, /, **values: Any) -> str:
    """The HTML of a macro of `templates/<template>.html`. Values are escaped, and invisible characters are shown."""
    return str(getattr(_environment.get_template(f"{template}.html").module, macro)(**values))


def alert(sentence: str, hint: str = "") -> str:
    """A message about what went wrong."""
    return render("parts", "alert", sentence=sentence, hint=hint)


def told(error: Exception) -> tuple[str, str]:
    """A sentence and a hint, which may be empty, for an error.

    For faults of the server, the log has only their type, and the page says only that one happened: the messages may
    contain paths of the server or questions of users.
    """
    if isinstance(error, ServiceError):
        return f"{error.message}.", error.hint
    problem = describe(error)
    if problem.http_status < 500:
        return f"{problem.sentence.removesuffix('.')}.", problem.hint
    _log.error("page: internal error: %s", type(error).__name__)
    return "Something went wrong on the server.", "try again; the server's log names the type of the error"


def named(text: str, *, max_chars: int = 80) -> Markup:
    """A name in an element with its own text direction. Long names are shortened in the middle."""
    text = text.translate(_INVISIBLE)
    if len(text) > max_chars:
        half = (max_chars - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return Markup("<bdi>{}</bdi>").format(text)


def coded(text: str) -> Markup:
    """A message in which `names in backticks` are shown as code."""
    parts = re.split("`([^`]+)`", text.translate(_IN_TEXT))
    pieces = [Markup("<code>{}</code>" if number % 2 else "{}").format(part) for number, part in enumerate(parts)]
    return Markup("").join(pieces)


def milliseconds(value: float) -> str:
    """A time in milliseconds as text with about three digits: 0.4 ms, 37 ms, 1.25 s."""
    if value >= 999.5:
        return f"{value / 1e3:,.2f} s"
    return f"{value:.1f} ms" if value < 9.95 else f"{value:.0f} ms"


def duration(seconds: float) -> str:
    """A duration as text: 0.8 s, 12 s, 3 min 20 s, 1 h 5 min."""
    return f"{max(0.0, seconds):.1f} s" if seconds < 9.95 else progress.duration(seconds)


def size(num_bytes: int) -> str:
    """Bytes in decimal units: 812 bytes, 35 kB, 2.4 MB."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes < 999_500 else f"{num_bytes / 1e6:.1f} MB"


def rate(per_second: float) -> str:
    """Pictures per second as text; per minute if they are slow."""
    if per_second and per_second < 0.5:
        return f"{per_second * 60:.1f} pictures/min"
    return f"{per_second:.1f} pictures/s" if per_second < 100 else f"{per_second:.0f} pictures/s"


def percent(probability: float) -> str:
    """A probability in per cent, never shown as 0 or 100: 98.7%, >99.9%, <0.1%."""
    text = f"{probability:.1%}"
    return {"100.0%": ">99.9%", "0.0%": "<0.1%"}.get(text, text)


def _visible(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, Markup):
        return value.translate(_IN_TEXT)
    return value


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.globals["serial"] = partial(next, count())
_environment.filters.update(
    coded=coded,
    counted=counted,
    duration=duration,
    ms=milliseconds,
    named=named,
    percent=percent,
    rate=rate,
    size=size,
)
