"""What a batch run shows: progress in words, bounded lists, and nothing of a user's as HTML."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from llama_adapter.app.online.service import UnavailableError
from llama_adapter.app.records.record import ErrorRecord, Record
from llama_adapter.app.web import batch_view
from llama_adapter.app.web.batch_types import Progress, Result
from llama_adapter.app.web.troubles import told

HOSTILE = '<img src=x onerror=alert(1)> ${alert(2)} {{3}} `4` " onclick="5'


def result(index: int, *, picture: str = "", text: str = "a red star", code: str = "") -> Result:
    record = Record(
        id=str(index),
        picture=picture or f"{index:04}.png",
        prompt="What is it?",
        text="" if code else text,
        finish="error" if code else "stop",
        choice=None,
        tokens=3,
        error=ErrorRecord(code=code, message=f"It is {code}. {text}") if code else None,
        ms={"total": 12.0},
        run="run",
    )
    return Result(index=index, record=record, thumbnail=None if code else "data:image/jpeg;base64,AAAA")


def progress(**changes: object) -> Progress:
    values = {
        "num_pictures": 28,
        "num_done": 12,
        "num_failed": 1,
        "elapsed_s": 3.0,
        "pictures_per_s": 4.0,
        "remaining_s": 4.0,
        "waits_for": "",
    }
    return Progress(**{**values, **changes})  # type: ignore[arg-type]


class Elements(HTMLParser):
    """Tags and attributes, and whether every element is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str | None]] = {}
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)
        if tag not in ("img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_progress_says_done_of_all_failed_speed_and_time_left() -> None:
    html = batch_view.progress_view(progress(), state="running")

    assert words(html) == "12 of 28 pictures 1 failed 4.0 pictures/s about 4 s left"
    bar = Elements(html).attributes
    assert (bar["aria-valuenow"], bar["aria-valuemax"]) == (["12"], ["28"])


def test_progress_says_what_the_service_is_waited_for() -> None:
    assert "waiting: 64 requests wait" in words(
        batch_view.progress_view(progress(waits_for="64 requests wait"), state="running")
    )


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("done", "Done: 11 answered, 1 failed."),
        ("cancelled", "Cancelled: 11 answered, 1 failed, 16 not asked."),
        ("failed", "Ended early: 11 answered, 1 failed, 16 not asked."),
    ],
)
def test_the_end_is_told_in_a_sentence(state: batch_view.State, told: str) -> None:
    assert told in words(batch_view.progress_view(progress(), state=state))


def test_every_view_is_well_formed_and_escapes_what_comes_from_outside() -> None:
    results = [result(0, picture=HOSTILE, text=HOSTILE), result(1, picture=HOSTILE, text=HOSTILE, code=HOSTILE)]
    html = [
        batch_view.progress_view(progress(), state="failed", notes=[HOSTILE], trouble=HOSTILE),
        "".join(batch_view.cards(results[:1], num_answered=1)),
        "".join(batch_view.table(results)),
        batch_view.problem(HOSTILE, HOSTILE),
    ]
    for part in html:
        found = Elements(part)
        assert found.tags.count("img") == ("grid" in part)
        assert not {"onerror", "onclick"} & found.attributes.keys()


def test_the_table_has_file_answer_finish_tokens_time_and_the_reason_of_an_error() -> None:
    shown = words("".join(batch_view.table([result(0), result(1, code="truncated")])))

    assert "0000.png a red star stop 3 12 ms" in shown
    assert "0001.png truncated It is truncated." in shown


def test_failed_files_come_first_and_all_stand_in_the_order_of_the_files() -> None:
    results = [result(index, code="empty" if index in (1, 4) else "") for index in (4, 2, 0, 1, 3)]
    names = re.findall(r"\d{4}\.png", "".join(batch_view.table(results)))

    assert names == ["0001.png", "0004.png", "0000.png", "0002.png", "0003.png"]


def test_of_many_results_the_failed_and_the_newest_are_shown_and_the_rest_is_told() -> None:
    results = [result(index, code="empty" if index == 0 else "") for index in range(2_000)]
    table = batch_view.table(results)

    assert "the failed and the newest, 101 of 2,000; the downloads have all" in table[0]
    assert len([row for row in table if row.startswith("<tr")]) == 101
    cards = batch_view.cards(results[-60:], num_answered=1_999)
    assert "the newest 60 of 1,999" in cards[0]


def test_an_answer_about_an_unfamiliar_picture_is_marked_on_its_card_and_in_the_table() -> None:
    plain = result(0)
    doubted = dataclasses.replace(plain, record={**plain.record, "unfamiliar": True})
    known = dataclasses.replace(plain, record={**plain.record, "unfamiliar": False})

    for each, count in ((plain, 0), (known, 0), (doubted, 1)):
        for html in (batch_view.cards([each], num_answered=1), batch_view.table([each])):
            Elements("".join(html))
            assert "".join(html).count("unlike the pictures the model was trained on") == count


def test_a_chosen_answer_shows_its_probability() -> None:
    chosen = result(0, text="yes")
    chosen.record["choice"] = {"yes": 0.987, "no": 0.013}

    assert batch_view.answer_text(chosen.record) == "yes (99%)"


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "0 s"), (59, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (3_900, "1 h 5 min")]
)
def test_durations_are_told_as_people_do(seconds: float, told: str) -> None:
    assert batch_view.duration(seconds) == told


# Errors


def test_what_users_can_mend_is_told_in_full() -> None:
    assert told(ValueError("Wanted two choices, got 1")) == ("Wanted two choices, got 1.", "")
    assert told(UnavailableError("The model is being loaded", hint="ask again later")) == (
        "The model is being loaded.",
        "ask again later",
    )


@pytest.mark.parametrize("error", [OSError(28, "No space left", "/srv/secret/path"), RuntimeError("/srv/secret/path")])
def test_a_fault_of_the_server_names_none_of_its_paths(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert "secret" not in " ".join(told(error)) + caplog.text
    assert "Something went wrong on the server" in told(error)[0]
