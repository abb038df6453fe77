"""What the About tab and the page's head show, as HTML: the model, the service's state, its limits. No Gradio."""

from importlib import metadata

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.measuring.report import versions
from llama_adapter.app.online.service import Service, ServiceLimits, ServiceStatus, UnavailableError
from llama_adapter.app.web.escaping import escaped, size

_STATES = {
    "loading": "The model is being loaded.",
    "ready": "Ready.",
    "restarting": "The engine failed and is being loaded anew.",
    "draining": "The service is about to stop and takes no more questions.",
    "failed": "The model could not be loaded.",
    "closed": "The service is closed.",
}
_EMBEDDED = """
<p>It is a very small model of exactly the structure that this product runs (5.2 million parameters), really trained,
on pictures drawn by our own code. <strong>It knows nothing else.</strong></p>
<ul>
<li><strong>It can</strong> describe one to three drawn shapes (circle, square, triangle, star, cross, ring, heart,
moon) in eight colours (red, orange, yellow, green, blue, purple, white, black) and two sizes, and say where they are.
Of 2,000 fresh pictures of this kind it described 99.8 % rightly.</li>
<li><strong>It can</strong> answer how many there are, which colour, which shape, large or small, where, whether there
is one, whether it is left of, right of, above or below another, and what is there. Ask in the words of the questions
to start from: it follows the sentence, not its meaning.</li>
<li><strong>It cannot</strong> see photographs: it describes a plain shape that is not there, in the same sure
words.</li>
<li><strong>It cannot</strong> say that it does not know. Asked about a moon where there is none, it tells of some
other shape.</li>
<li><strong>It cannot</strong> follow other questions, other languages or an earlier question, and was only tried at
temperature 0.</li>
</ul>
"""
_REAL = """
<p>A model made from the weights that this service was started with. What it knows, and what it gets wrong, comes from
them: it may describe what is not in the picture, in sure words. Each question is answered by itself; the model sees
the picture and this question, not the earlier ones.</p>
"""


def page_head(service: Service) -> str:
    """Name, and model and state in a few words."""
    status = service.status()
    try:
        words = f"{service.info.name} on {service.info.device}"
    except UnavailableError:
        words = "no model"
    if status.state != "ready":
        words = f"{words}: {status.state}"
    kind = "is-ready" if status.state == "ready" and not status.is_stalled else "is-down"
    kind = "" if status.state in ("loading", "restarting") else kind
    return (
        '<header class="la-header"><h1>LLaMA-Adapter</h1><p>Show it a picture, ask in words.</p>'
        f'<span class="la-state {kind}" role="status"><i aria-hidden="true"></i>{escaped(words)}</span></header>'
    )


def state_card(status: ServiceStatus) -> str:
    """How the service is, in words and numbers."""
    sentence = "The engine has not moved for a while." if status.is_stalled else _STATES[status.state]
    rows = {
        "answering now": str(status.num_running),
        "waiting": str(status.num_waiting),
        "pictures being read": f"{status.num_reading}, {status.num_slow_reading} of them slowly",
        "pictures kept encoded": str(status.num_encoded),
        "engine restarts": str(status.restarts),
        "running for": _duration(status.uptime_s),
    }
    if status.last_error:
        rows["last error"] = status.last_error
    return f'<section class="la-card is-strip"><h2>Service</h2><p role="status">{sentence}</p>{_rows(rows)}</section>'


def about(service: Service) -> str:
    """The model, the limits, the versions, and what the model can do."""
    try:
        info, is_embedded = service.info, service.spec.is_embedded
    except UnavailableError as error:
        sentence = f"{error.message}. Open this page again later."
        return f'<section class="la-card"><h2>Model</h2><p>{escaped(sentence)}</p></section>'
    abilities = _EMBEDDED if is_embedded else _REAL
    title = "What the embedded model can and cannot do" if is_embedded else "What to expect"
    packages = {**versions(), "gradio": metadata.version("gradio")}
    notes = "".join(f"<p>{escaped(note)}</p>" for note in info.notes)
    return (
        '<div class="la-about">'
        f'<section class="la-card is-wide"><h2>{title}</h2>{abilities}</section>'
        f'<section class="la-card"><h2>Model</h2>{_rows(_model_rows(info))}{notes}</section>'
        f'<section class="la-card"><h2>Limits</h2>{_rows(_limit_rows(service.limits))}</section>'
        f'<section class="la-card"><h2>Versions</h2>{_rows(packages)}</section>'
        "</div>"
    )


def _model_rows(info: ModelInfo) -> dict[str, str]:
    return {
        "name": info.name,
        "digest": info.digest,
        "device": info.device,
        "dtype": info.dtype,
        "precision": info.precision,
        "context": f"{info.context} tokens",
        "mode": info.mode,
        "picture encoder": info.vision,
        "operators": info.operators,
        "default prompt": info.default_prompt,
    }


def _limit_rows(limits: ServiceLimits) -> dict[str, str]:
    return {
        "picture file": f"at most {size(limits.max_picture_bytes)}",
        "picture": f"at most {limits.max_pixels / 1e6:g} million pixels",
        "question": f"at most {limits.max_prompt_chars:,} characters",
        "an answer takes": f"at most {limits.timeout_s:g} s",
        "waiting": f"at most {limits.max_waiting} questions, {limits.max_waiting_per_client} of one page",
        "kept encoded": f"pictures of {size(limits.encoded_bytes)} in all",
    }


def _rows(rows: dict[str, str]) -> str:
    entries = (f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in rows.items())
    return f"<dl>{''.join(entries)}</dl>"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
