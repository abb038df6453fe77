"""What happens in the Yes/No tab: questions about many pictures, and new decisions without asking again. No layout."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from llama_adapter.app.calibration.decisions import Rule, parse_choices
from llama_adapter.app.online.service import Service
from llama_adapter.app.web.escaping import alert
from llama_adapter.app.web.looking import File, files_of
from llama_adapter.app.web.offers import offered
from llama_adapter.app.web.picture_input import picked, sample_upload
from llama_adapter.app.web.runs import Runs
from llama_adapter.app.web.yes_no_run import MAX_PICTURES, judge
from llama_adapter.app.web.yes_no_state import YesNoSession
from llama_adapter.app.web.yes_no_view import results

TAB = "yes-no"


class YesNoEvents:
    """Handlers of one page's events. Values come as the browser sent them, so each is looked at here."""

    def __init__(self, service: Service, *, samples: Sequence[Path], runs: Runs) -> None:
        self._service, self._samples, self._runs = service, samples, runs

    def add_sample(self, value: Any, event: gr.EventData) -> Any:
        """A sample was pressed: one more file."""
        index = picked(event, count=len(self._samples))
        if index is None:
            return gr.skip()
        paths = [path for path, _ in files_of(value)]
        sample = sample_upload(self._samples, index)
        return paths if sample in paths else [*paths, sample]

    def start_from(self, event: gr.EventData) -> Any:
        """A question to start from was pressed."""
        questions = offered(self._service).questions
        index = picked(event, count=len(questions))
        return gr.skip() if index is None else questions[index].text

    def stop(self, request: gr.Request) -> None:
        """What is answered stays; the handler that waits for the rest shows that it ended."""
        self._runs.stop(str(request.session_hash), TAB)

    def decide_anew(self, session: YesNoSession, threshold: Any, band: Any) -> str:
        """A slider was moved."""
        session.rule = _rule(threshold, band)
        return results(session.judged, session.choices, session.rule)

    async def ask(
        self, request: gr.Request, session: YesNoSession, files: Any, question: Any, choices: Any, *rule: Any
    ) -> AsyncGenerator[list[Any]]:
        """Judge the files: results, notice, session, two buttons."""
        page = str(request.session_hash)
        try:
            pictures, question, parsed = _checked(files, question, choices)
        except ValueError as error:
            yield [gr.skip(), alert(f"{error}."), session, *_buttons(busy=False)]
            return
        note = ""
        if len(pictures) > MAX_PICTURES:
            note = f'<p class="la-note">Only the first {MAX_PICTURES} pictures are asked; Batch takes more.</p>'
        with self._runs.open(page, TAB) as run:
            session.run, session.choices, session.rule = run, parsed, _rule(*rule)
            files = pictures[:MAX_PICTURES]
            states = judge(self._service, run, files=files, question=question, choices=parsed, client=f"page {page}")
            async with aclosing(states):
                async for judged in states:
                    if session.run is not run:
                        return
                    session.judged = judged
                    html = results(judged, parsed, session.rule)
                    yield [html, note, session, *_buttons(busy=any(one.is_open for one in judged))]


def _checked(files: Any, question: Any, choices: Any) -> tuple[list[File], str, tuple[str, ...]]:
    """Raises ValueError with a sentence for the page."""
    pictures = files_of(files)
    if not pictures:
        raise ValueError("Choose one picture or more first")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("Write a question first")
    return pictures, question.strip(), parse_choices(choices if isinstance(choices, str) else "")


def _rule(threshold: Any, band: Any) -> Rule:
    """As the sliders stand; what is no number in their range counts as the nearest, or as the usual value."""
    usual = Rule()
    return Rule(threshold=_share(threshold, usual=usual.threshold), band=_share(band, usual=usual.band))


def _share(value: Any, *, usual: float) -> float:
    if not isinstance(value, (int, float)) or value != value:  # not a number
        return usual
    return float(min(max(value, 0.0), 1.0))  # in this order: a whole number may be too large for a float


def _buttons(*, busy: bool) -> list[Any]:
    return [gr.update(interactive=not busy), gr.update(interactive=busy)]
