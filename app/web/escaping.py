"""Text and numbers for HTML: whatever comes from a user, a file or the model goes through here. No Gradio."""

import html

# Characters that turn the reading direction around or hide: a file name must not disturb the words beside it.
_INVISIBLE = dict.fromkeys((*range(32), 127, *range(8234, 8239), *range(8294, 8298)), "�")
_IN_TEXT = {code: shown for code, shown in _INVISIBLE.items() if chr(code) not in "\n\t"}


def escaped(text: str) -> str:
    """Text for the inside of an element or of a quoted attribute; line breaks stay."""
    return html.escape(text.translate(_IN_TEXT), quote=True)


def named(text: str, *, max_chars: int = 80) -> str:
    """A file name or the like as an element that keeps its own reading direction; long ones lose their middle."""
    text = text.translate(_INVISIBLE)
    if len(text) > max_chars:
        half = (max_chars - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    return f"<bdi>{html.escape(text, quote=True)}</bdi>"


def milliseconds(value: float) -> str:
    """A time in three digits or so: 0.4 ms, 37 ms, 1.25 s."""
    if value >= 999.5:
        return f"{value / 1e3:,.2f} s"
    return f"{value:.1f} ms" if value < 9.95 else f"{value:.0f} ms"


def size(num_bytes: int) -> str:
    """A number of bytes as people write it: 812 bytes, 35 kB, 2.4 MB, by 1000."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes < 999_500 else f"{num_bytes / 1e6:.1f} MB"


def unfamiliar_note() -> str:
    """Said beside an answer about a picture that the model was not made for."""
    return (
        '<p class="la-doubt">This picture does not look like those the model was trained on: '
        "the answer may mean nothing.</p>"
    )


def problem_card(sentence: str, hint: str = "") -> str:
    """What went wrong and what to do, as a card; told to screen readers by the region it stands in."""
    advice = f'<p class="la-hint">{escaped(hint)}</p>' if hint else ""
    return f'<div class="la-problem"><p>{escaped(sentence)}</p>{advice}</div>'


def alert(sentence: str, hint: str = "") -> str:
    """A problem that screen readers tell at once."""
    return f'<div role="alert">{problem_card(sentence, hint)}</div>'
