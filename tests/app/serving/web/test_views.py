"""The page's HTML: values are never markup, elements are closed, and figures are computed from records."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.jobs.records.record import ErrorRecord, Record
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.serving.online.service import Service, UnavailableError
from llama_adapter.app.serving.web.batch_run import Progress, Result
from llama_adapter.app.serving.web.batch_view import State, cards, decisions, failures, progress_view
from llama_adapter.app.serving.web.chat import conversation
from llama_adapter.app.serving.web.chat_session import MAX_TURNS, ChatSession, PickedPicture, Turn
from llama_adapter.app.serving.web.html import duration, milliseconds, named, percent, rate, render, size, told
from llama_adapter.app.serving.web.page import about, head
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import Problem
from tests.app.serving.http_api import live

EVIL = '<img src=x onerror=alert(1)>"\' ${alert(2)} {{3}} `4` & " onclick="5\u202egnp.exe'
PICTURE = PickedPicture(source="/a.png", shown="/a.png", name="a.png", width=4, height=3, num_bytes=2000)
PROGRESS = Progress(
    num_pictures=28, num_done=12, num_failed=1, elapsed_s=3.0, pictures_per_s=4.0, remaining_s=4.0, waits_for=""
)
STATUS = live.status(num_running=1, num_waiting=2, num_reading=2, num_slow_reading=1, num_encoded=3, uptime_s=3725.0)


class Elements(HTMLParser):
    """The attributes of all elements. Asserts that every element is closed in the right place."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: dict[str, list[str | None]] = {}
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)
        if tag not in ("img", "br", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def answer(text: str = "a red star", **changes: Any) -> Answer:
    ms = {"queue": 0.2, "read": 1.0, "clip": 4.0, "first_token": 10.0, "total": 30.0}
    return live.answer(text, **{"picture": "a.png", "ms": ms, **changes})


def shown(**turn: Any) -> str:
    return conversation([Turn(**{"question": "q", **turn})])


def picture_of(picture: PickedPicture | None, *, problems: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    limits = {"is_taken": True, "max_bytes": 1, "max_files": 1}
    return render("chat", "picture", picture=picture, problems=problems, notes=notes, **limits)


def result(index: int, *, picture: str = "", text: str = "a red star", code: str = "", **changes: Any) -> Result:
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
    record.update(changes)  # type: ignore[typeddict-item]
    return Result(index=index, record=record, thumbnail=None if code else "data:image/jpeg;base64,AAAA")


def judged(index: int, probability: float, **changes: Any) -> Result:
    choice = {"yes": probability, "no": 1.0 - probability}
    return result(index, text=max(choice, key=lambda name: choice[name]), choice=choice, **changes)


@pytest.mark.parametrize(
    "html",
    [
        shown(question=EVIL),
        shown(text=EVIL),
        shown(answer=answer(text=EVIL)),
        shown(answer=answer(finish="error", error=AnswerError(code="truncated", message=EVIL))),
        shown(text=EVIL, problem=Problem(exit_code=ExitCode.USAGE, http_status=400, sentence="", hint="")),
        shown(problem=Problem(exit_code=ExitCode.USAGE, http_status=400, sentence=EVIL, hint=EVIL)),
        picture_of(dataclasses.replace(PICTURE, name=EVIL, shown=f"/{EVIL}")),
        picture_of(PICTURE, problems=[EVIL], notes=[EVIL]),
        render("batch", "files", files=[EVIL], num_files=2, problems=[EVIL], is_taken=True, max_bytes=1, max_files=1),
        render("about", "state", status=dataclasses.replace(STATUS, last_error=EVIL)),
        render("parts", "alert", sentence=EVIL, hint=EVIL),
        progress_view(PROGRESS, state="failed", notes=[EVIL], trouble=EVIL),
        "".join(cards([result(0, picture=EVIL, text=EVIL)], num_answered=1, rule=Rule())),
        "".join(cards([judged(0, 0.9, picture=EVIL)], num_answered=1, rule=Rule())),
        "".join(cards([result(0, choice={EVIL: 0.9, "no": 0.1})], num_answered=1, rule=Rule())),
        "".join(failures([result(1, picture=EVIL, text=EVIL, code=EVIL)])),
        decisions([result(0, text=EVIL, choice={EVIL: 0.9, "no": 0.1})], (EVIL, "no"), Rule()),
        named(EVIL),
    ],
)
def test_text_of_users_files_and_models_is_never_markup(html: str) -> None:
    assert not {"onerror", "onclick"} & Elements(html).attributes.keys()
    assert "&lt;img src=x" in html
    assert "\u202e" not in html


def test_texts_of_the_page(snapshot: Any) -> None:
    cancelled = AnswerError(code="cancelled", message="")
    turns: list[dict[str, Any]] = [
        {},
        {"is_reused": True},
        {"token_ids": (1,)},
        {"ms": {"total": 3.0}},
        {"finish": "error", "error": cancelled},
        {"finish": "length"},
    ]
    states: list[State] = ["running", "done", "cancelled", "failed"]
    waiting = dataclasses.replace(PROGRESS, waits_for="64 requests wait")
    services: list[dict[str, Any]] = [{}, {"is_stalled": True}]
    services += [{"state": state} for state in ("loading", "restarting", "draining", "failed", "closed")]
    failing = [result(index, code="empty" if index in (1, 4) else "") for index in (4, 2, 0, 1, 3)]
    chosen = [judged(0, 0.987), judged(1, 0.52), judged(2, 0.7), result(3, code="empty")]
    rules = [Rule(), Rule(threshold=0.5, band=0.0), Rule(threshold=0.9)]
    texts = {
        "answers": [shown(answer=answer(**turn)) for turn in turns],
        "progress": [progress_view(waiting, state=state) for state in states],
        "failed": ["".join(failures(failing))],
        "cards": [
            "".join(cards(each, num_answered=2, rule=Rule())) for each in (chosen[:2], [result(2, finish="length")])
        ],
        "decisions": [decisions(chosen, ("yes", "no"), rule) for rule in rules],
        "service": [render("about", "state", status=dataclasses.replace(STATUS, **change)) for change in services],
    }

    assert {name: [words(html) for html in each] for name, each in texts.items()} == snapshot


@pytest.mark.parametrize(
    ("shown", "values"),
    [
        (milliseconds, {0.04: "0.0 ms", 9.94: "9.9 ms", 37.2: "37 ms", 1250.0: "1.25 s"}),
        (size, {812: "812 bytes", 35_000: "35 kB", 2_400_000: "2.4 MB"}),
        (duration, {0.21: "0.2 s", 9.9: "9.9 s", 59: "59 s", 60: "1 min 0 s", 200: "3 min 20 s", 3_900: "1 h 5 min"}),
        (rate, {0.1: "6.0 pictures/min", 4.04: "4.0 pictures/s", 250: "250 pictures/s"}),
        (percent, {0.99999: ">99.9%", 0.00001: "<0.1%", 1.0: ">99.9%", 0.0: "<0.1%", 0.25: "25.0%"}),
    ],
)
def test_figures_have_a_unit_and_few_digits(shown: Callable[[float], str], values: dict[float, str]) -> None:
    assert {value: shown(value) for value in values} == values


def test_bars_have_the_probability_and_the_band() -> None:
    bars = "".join(cards([judged(0, 0.987)], num_answered=1, rule=Rule()))

    assert "width:98.7%" in bars
    assert "left:45.0%;width:10.0%" in bars
    assert decisions([], (), Rule()) == ""


# Chat


def test_an_open_answer_is_busy_in_a_log_that_screen_readers_follow() -> None:
    assert Elements(shown(text="a red")).attributes["role"] == ["region", "log"]
    assert Elements(shown(text="a red")).attributes["aria-busy"] == ["true"]
    assert "aria-busy" not in Elements(shown(answer=answer())).attributes


@pytest.mark.parametrize(("unfamiliar", "is_doubted"), [(True, True), (False, False), (None, False)])
def test_an_answer_about_an_unfamiliar_picture_is_marked(unfamiliar: bool | None, is_doubted: bool) -> None:
    changes = {} if unfamiliar is None else {"unfamiliar": unfamiliar}
    for each in (result(0, **changes), judged(0, 0.9, **changes)):
        assert "".join(cards([each], num_answered=1, rule=Rule())).count("la-batch-doubt") == is_doubted
    assert shown(answer=answer(unfamiliar=unfamiliar)).count("la-doubt") == is_doubted


def test_a_chat_forgets_its_oldest_turns_first() -> None:
    session = ChatSession()
    for number in range(MAX_TURNS + 3):
        session.begin("run", Turn(question=str(number)))
        session.update(Turn(question=str(number), answer=answer()))

    assert [turn.question for turn in session.turns] == [str(number) for number in range(3, MAX_TURNS + 3)]


def test_a_new_picture_starts_a_new_chat_and_clearing_keeps_the_picture() -> None:
    session = ChatSession()
    session.choose(PICTURE)
    session.begin("run", Turn(question="q"))
    same = dataclasses.replace(PICTURE, shown="preview")

    session.choose(same)
    assert (session.picture, len(session.turns)) == (same, 1)
    session.clear()
    assert (session.picture, session.turns, session.run) == (same, (), None)
    session.begin("run", Turn(question="q"))
    session.choose(dataclasses.replace(PICTURE, source="/b.png"))
    assert session.turns == ()


def test_a_question_that_overtakes_another_closes_it_and_a_repeated_one_replaces_it() -> None:
    session = ChatSession()
    session.begin("first", Turn(question="one"))
    session.begin("second", Turn(question="two"))
    assert [turn.is_open for turn in session.turns] == [False, True]

    session.begin("third", Turn(question="two"), is_again=True)
    assert [turn.question for turn in session.turns] == ["one", "two"]
    assert session.run == "third"


# Batch


def test_every_file_is_shown_once_and_of_many_the_newest() -> None:
    results = [result(index, code="empty" if index < 101 else "") for index in range(2_000)]
    failed, answered = failures(results), cards(results[-60:], num_answered=1_899, rule=Rule())

    assert "newest 100 of 101" in failed[0]
    assert [row.count("<li") for row in failed] == [0, *[1] * 100, 0]
    assert "newest 60 of 1,899" in answered[0]
    assert failures(results[101:]) == []
    names = re.findall("<bdi>(.+?)</bdi>", "".join([*failed, *answered]))
    assert len(names) == len(set(names)) == 160


# About


@pytest.mark.slow
def test_about_has_the_model_its_limits_and_what_it_cannot_do(service: Service) -> None:
    text = words(about(service))

    for expected in (service.info.name, service.info.digest, service.info.dtype, "512 tokens", "50 million pixels"):
        assert expected in text
    assert "It knows nothing else." in text
    assert "weights A tiny LLaMA-Adapter V2 model" in text
    assert f"{service.info.name} on {service.info.device}" in head(service)
    assert "is-ready" in head(service)


def test_without_a_model_the_page_says_so() -> None:
    service = Service(Captioner.load)

    assert "no model: loading" in head(service)
    assert "is-ready" not in head(service)
    assert "The model is being loaded." in about(service)


# Figures and errors


def test_a_long_name_loses_its_middle() -> None:
    html = named("a" * 200 + ".png", max_chars=20)

    assert "…" in html
    assert html.endswith("a.png</bdi>")
    assert len(html) < 40


def test_errors_of_users_are_told_in_full() -> None:
    assert told(ValueError("Wanted two choices, got 1")) == ("Wanted two choices, got 1.", "")
    error = UnavailableError("The model is being loaded", hint="ask again later")
    assert told(error) == ("The model is being loaded.", "ask again later")


@pytest.mark.parametrize("error", [OSError(28, "No space left", "/srv/secret/path"), RuntimeError("/srv/secret/path")])
def test_errors_of_the_server_name_none_of_its_paths(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert "Something went wrong" in told(error)[0]
    assert "secret" not in " ".join(told(error)) + caplog.text
