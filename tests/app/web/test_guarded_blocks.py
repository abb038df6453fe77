"""What fails in an event is logged by its kind and place, in few lines and without what was sent."""

import asyncio
import logging
from typing import Any

import gradio as gr
import pytest

from llama_adapter.app.web import guarded_blocks
from llama_adapter.app.web.guarded_blocks import MAX_FAULT_LINES_A_MINUTE, FaultLog, GuardedBlocks

SENT = "what was sent \x1b[31m\n"


def outcome(error: Exception, values: list[Any]) -> gr.Error:
    """What a page raises whose handler raises that error, for an event with these values."""

    def handle(text: str) -> str:
        raise error

    async def process() -> None:
        with GuardedBlocks() as page:  # in a running event loop, else Gradio opens one that nobody closes
            box = gr.Textbox()
            box.input(handle, box, box)
        await page.process_api(page.fns[0], values)

    with pytest.raises(gr.Error) as caught:
        asyncio.run(process())
    return caught.value


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("llama_adapter"), "propagate", True)
    caplog.set_level(logging.ERROR, "llama_adapter")
    return caplog


@pytest.mark.parametrize("values", [[SENT], []], ids=["the handler fails", "too few values"])
def test_a_fault_is_one_line_without_what_was_sent(values: list[Any], lines: pytest.LogCaptureFixture) -> None:
    error = outcome(KeyError(SENT), values)

    assert error.print_exception is False
    assert error.message is None, "the reply says nothing of it, as Gradio's own"
    (line,) = lines.messages
    assert line.startswith(("page: an event failed: KeyError in handle (", "page: an event failed: ValueError in "))
    assert line.isprintable()
    assert "what was sent" not in line


def test_what_users_are_told_stays_and_is_not_printed(lines: pytest.LogCaptureFixture) -> None:
    error = outcome(gr.Error(SENT), [SENT])

    assert (error.message, error.print_exception) == (SENT, False)
    assert len(lines.messages) == 1
    assert "what was sent" not in lines.text


def test_an_error_that_is_not_to_be_printed_is_not_logged(lines: pytest.LogCaptureFixture) -> None:
    assert outcome(gr.Error(SENT, print_exception=False), [SENT]).message == SENT
    assert lines.messages == []


def test_many_faults_are_counted(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [6000.0]
    monkeypatch.setattr(guarded_blocks.time, "monotonic", lambda: now[0])
    faults = FaultLog()
    for _ in range(MAX_FAULT_LINES_A_MINUTE + 7):
        faults.tell(ValueError(SENT))
    assert len(lines.messages) == MAX_FAULT_LINES_A_MINUTE

    now[0] += 60
    faults.tell(ValueError(SENT))
    assert lines.messages[MAX_FAULT_LINES_A_MINUTE] == "page: 7 more events failed in the same minute"
    assert len(lines.messages) == MAX_FAULT_LINES_A_MINUTE + 2
