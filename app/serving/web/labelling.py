"""The page of `label`: one picture, its possible labels as numbered buttons, and the keys that press them."""

from pathlib import Path
from typing import Any, Final

import gradio as gr

from llama_adapter.app.serving.web.guards import GuardedBlocks
from llama_adapter.app.serving.web.html import render
from llama_adapter.app.serving.web.label_session import LabelSession
from llama_adapter.app.serving.web.page import limited
from llama_adapter.app.serving.web.widgets import DIRECT
from llama_adapter.runtime.problems import describe

KEYS: Final = "1234567890"  # of the first ten choices, in their order
_SCRIPT: Final = Path(__file__).with_name("labelling.js").read_text(encoding="utf-8")


def build_labelling(session: LabelSession) -> gr.Blocks:
    """The page of a session. Mount it with `page.mount_page`, as the page of `web`."""
    page = GuardedBlocks(title="Label pictures: LLaMA-Adapter", analytics_enabled=False)

    def opened() -> str:
        return label_html(session)

    def act(event: gr.EventData) -> Any:
        data = event._data if isinstance(event._data, dict) else {}
        if data.get("action") == "wait" and session.is_waiting(data.get("picture")):
            return gr.skip()
        return label_html(session, problem=apply(session, data))

    with page:
        # `labelling.js` triggers the event `act`, and Gradio finds its name there.
        view = gr.HTML("", js_on_load=_SCRIPT, elem_id="label", apply_default_css=False)
        view.act(act, None, view, **DIRECT)
        page.load(opened, None, view, **DIRECT)
    return limited(page)


def apply(session: LabelSession, data: dict[str, Any]) -> tuple[str, str]:
    """Do what an event of the page asks for; returns a sentence and a hint if that fails, else empty texts.

    `data` comes from the browser: an `action`, the `picture` that was shown, and the `choice`. Anything else, and an
    event about a picture that is no longer shown, changes nothing.
    """
    action, picture, choice = (data.get(name) for name in ("action", "picture", "choice"))
    picture = picture if type(picture) is int else None
    try:
        if action == "undo":
            session.undo(picture)
        elif action == "skip" and picture is not None:
            session.skip(picture)
        elif action == "choose" and picture is not None and type(choice) is int and 0 <= choice < len(session.choices):
            session.choose(picture, choice)
    except Exception as error:  # the disk is full, for example: the picture stays, and nothing is lost
        problem = describe(error)
        return problem.sentence, problem.hint
    return "", ""


def label_html(session: LabelSession, *, problem: tuple[str, str] = ("", "")) -> str:
    """The page's HTML for the present state."""
    return render(
        "labelling",
        "view",
        shown=session.shown(),
        question=session.question,
        choices=session.choices,
        table=session.table_name,
        keys=KEYS,
        problem=problem,
    )
