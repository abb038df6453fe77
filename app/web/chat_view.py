"""A chat as HTML: questions, answers as they grow, and the figures under each. Everything is escaped. No Gradio."""

from llama_adapter.app.tasks.answers import Answer
from llama_adapter.app.web.chat_state import Chat, Turn
from llama_adapter.app.web.escaping import alert, escaped, milliseconds, named, problem_card, size, unfamiliar_note

_STAGES = (  # of `Answer.ms`, in the order in which they happen
    ("queue", "queue", "waiting for its turn"),
    ("read", "read", "reading and resizing the picture"),
    ("clip", "clip", "encoding the picture, with others of its batch"),
    ("first_token", "first token", "from the question to the first piece of the answer"),
    ("total", "total", "from the question to the end of the answer"),
)
_DOTS = '<span class="la-dots" role="img" aria-label="thinking"><i></i><i></i><i></i></span>'
_REUSED = '<span class="la-badge" title="kept from an earlier question, not encoded again">picture encoded once</span>'
_EMPTY = (
    '<div class="la-empty"><p class="la-empty-title">Look at a picture together</p>'
    "<p>Choose a picture, then ask something about it in your words, or start from a question below.</p></div>"
)
_SHOWN_ERRORS = {
    "cancelled": "Stopped: this is what there was until then.",
    "deadline": "Out of time: this is what there was until then.",
}


def conversation(chat: Chat) -> str:
    """All of it, inside a region that screen readers follow; empty states are written out."""
    turns = "".join(_turn(turn) for turn in chat.turns)
    # Reversed by the style, so that the newest line stays in sight without a script.
    return (
        '<div class="la-scroll" tabindex="0" role="region" aria-label="ActiveRequest">'
        '<div class="la-log" role="log" aria-live="polite" aria-relevant="additions text">'
        f"{turns or _EMPTY}</div></div>"
    )


def picture_line(chat: Chat) -> str:
    """What is known of the picture, below it."""
    picture = chat.picture
    if picture is None:
        return '<p class="la-note" role="status">No picture yet. Drop, paste or take one, or pick a sample below.</p>'
    if picture.problem:
        return alert(picture.problem)
    details = f"{picture.width} × {picture.height} pixels, {size(picture.num_bytes)}"
    return f'<p class="la-note" role="status"><strong>{named(picture.name)}</strong><br>{details}</p>'


def _turn(turn: Turn) -> str:
    question = f'<div class="la-question"><span class="la-hidden">You asked: </span>{escaped(turn.question)}</div>'
    return f'<div class="la-turn">{question}{_answer(turn)}</div>'


def _answer(turn: Turn) -> str:
    if turn.problem is not None:
        return problem_card(turn.problem.sentence, turn.problem.hint)
    answer = turn.answer
    if answer is None:
        waiting = (
            "" if turn.text else '<span class="la-dots" role="img" aria-label="thinking"><i></i><i></i><i></i></span>'
        )
        # Busy: read out once, when it is whole, and not at every word.
        return f'<div class="la-answer" aria-busy="true"><div class="la-text">{escaped(turn.text)}{waiting}</div></div>'
    error = answer.error
    if error is not None and error.code not in _SHOWN_ERRORS:
        return problem_card(error.message)
    text = escaped(answer.text) or '<span class="la-muted">(nothing)</span>'
    doubt = unfamiliar_note() if answer.unfamiliar else ""
    return f'<div class="la-answer"><div class="la-text">{text}</div>{doubt}{_endings(answer)}{_figures(answer)}</div>'


def _endings(answer: Answer) -> str:
    """Why the answer is not whole, where it is not."""
    if answer.error is not None:
        return f'<p class="la-cut">{_SHOWN_ERRORS[answer.error.code]}</p>'
    if answer.finish == "length":
        return '<p class="la-cut">Cut at the limit: raise “Most tokens” in the settings for more.</p>'
    return ""


def _figures(answer: Answer) -> str:
    items = [
        f'<span title="{meaning}">{label} <b>{milliseconds(answer.ms[key])}</b></span>'
        for key, label, meaning in _STAGES
        if key in answer.ms
    ]
    count = len(answer.token_ids)
    items.append(f"<span><b>{count}</b> token{'' if count == 1 else 's'}</span>")
    rate = tokens_per_second(answer)
    if rate is not None:
        items.append(f'<span title="after the first token"><b>{rate:,.0f}</b> tokens/s</span>')
    badge = _REUSED if answer.is_reused else ""
    return f'<div class="la-figures">{badge}{"".join(items)}</div>'


def tokens_per_second(answer: Answer) -> float | None:
    """Speed after the first token; None for fewer than two tokens."""
    if len(answer.token_ids) < 2 or not {"first_token", "total"} <= answer.ms.keys():
        return None
    elapsed_ms = answer.ms["total"] - answer.ms["first_token"]
    return (len(answer.token_ids) - 1) / elapsed_ms * 1e3 if elapsed_ms > 0 else None
