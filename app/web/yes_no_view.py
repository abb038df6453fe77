"""Judged pictures as HTML: bars of probabilities, the band of no decision, what was decided. Everything is escaped."""

from collections import Counter
from collections.abc import Mapping, Sequence

from llama_adapter.app.calibration.decisions import Rule, decide, explain
from llama_adapter.app.web.escaping import escaped, named, problem_card, unfamiliar_note
from llama_adapter.app.web.yes_no_state import Judged

_NO_PICTURE = '<span class="la-thumb" aria-hidden="true"></span>'
_EMPTY = (
    '<div class="la-scroll"><div class="la-log"><div class="la-empty">'
    '<p class="la-empty-title">One question, many pictures</p>'
    "<p>Choose pictures, write a question and its possible answers; each picture gets their probabilities.</p>"
    "</div></div></div>"
)


def results(judged: Sequence[Judged], choices: tuple[str, ...], rule: Rule) -> str:
    """A summary and one entry for each picture."""
    if not judged:
        return _EMPTY
    entries = "".join(_entry(one, choices, rule) for one in judged)
    is_open = any(one.is_open for one in judged)
    busy = ' aria-busy="true"' if is_open else ""
    return (
        f'<div role="status"{busy}>{_summary(judged, choices, rule)}</div>'
        f'<p class="la-note">{escaped(explain(choices, rule))}</p>'
        f'<ul class="la-results" tabindex="0" aria-label="Pictures and their answers">{entries}</ul>'
    )


def _summary(judged: Sequence[Judged], choices: tuple[str, ...], rule: Rule) -> str:
    decided = Counter(decide(one.choice, rule) for one in judged if one.choice is not None)
    undecided = decided.pop(None, 0)
    parts = [f"<span><b>{decided[name]}</b> {escaped(name)}</span>" for name in choices if decided[name]]
    if undecided:
        parts.append(f"<span><b>{undecided}</b> undecided</span>")
    if failed := sum(one.problem is not None for one in judged):
        parts.append(f"<span><b>{failed}</b> without an answer</span>")
    if waiting := sum(one.is_open for one in judged):
        parts.append(f"<span><b>{waiting}</b> under way</span>")
    return f'<p class="la-summary">{"".join(parts)}</p>'


def _entry(one: Judged, choices: tuple[str, ...], rule: Rule) -> str:
    picture = f'<img class="la-thumb" src="{escaped(one.thumbnail)}" alt="">' if one.thumbnail else _NO_PICTURE
    if one.problem is not None:
        body, decision = problem_card(one.problem), ""
    elif one.choice is None:
        body, decision = '<p class="la-note">Under way …</p>', ""
    else:
        doubt = unfamiliar_note() if one.unfamiliar else ""
        body, decision = _bars(one.choice, rule) + doubt, _decision(decide(one.choice, rule), choices)
    return f'<li class="la-result">{picture}<div><p class="la-name">{named(one.name)}</p>{body}</div>{decision}</li>'


def _bars(choice: Mapping[str, float], rule: Rule) -> str:
    """Each choice with its share in words and as a bar; the band shows where nothing is decided."""
    rows = []
    for index, (name, probability) in enumerate(choice.items()):
        share = 100.0 * probability
        band = _band(rule) if index == 0 or len(choice) > 2 else ""
        rows.append(
            f"<dt>{named(name, max_chars=40)}</dt>"
            f'<dd class="la-track" aria-hidden="true"><i style="width:{share:.1f}%"></i>{band}</dd>'
            f'<dd class="la-percent">{percent(probability)}</dd>'
        )
    return f'<dl class="la-bars">{"".join(rows)}</dl>'


def percent(probability: float) -> str:
    """Never 0 or 100 % for what is not exactly that."""
    text = f"{100 * probability:.1f} %"
    if text == "100.0 %" and probability < 1.0:
        return "> 99.9 %"
    return "< 0.1 %" if text == "0.0 %" and probability > 0.0 else text


def _band(rule: Rule) -> str:
    left, width = 100.0 * rule.lower, max(100.0 * (rule.upper - rule.lower), 0.6)
    return f'<s style="left:{left:.1f}%;width:{width:.1f}%"></s>'


def _decision(decided: str | None, choices: tuple[str, ...]) -> str:
    if decided is None:
        return '<span class="la-decision is-open">undecided</span>'
    other = "" if decided == choices[0] else " is-other"
    return f'<span class="la-decision{other}">{named(decided, max_chars=40)}</span>'
