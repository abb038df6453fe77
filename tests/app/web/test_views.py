"""What the page shows, as HTML: nothing of a user's or the model's is markup, and nothing is left unsaid."""

import re

import pytest

from llama_adapter.app.calibration.decisions import Rule
from llama_adapter.app.tasks.answers import Answer, AnswerError
from llama_adapter.app.web.chat_state import MAX_TURNS, Chat, ChatSession, PickedPicture, Turn
from llama_adapter.app.web.chat_view import conversation, picture_line, tokens_per_second
from llama_adapter.app.web.escaping import escaped, milliseconds, named, size
from llama_adapter.app.web.yes_no_state import Judged
from llama_adapter.app.web.yes_no_view import percent, results
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import Problem

EVIL = "<img src=x onerror=alert(1)>\"'&\u202egnp.exe"
PICTURE = PickedPicture(source="/a.png", shown="/a.png", name="a.png", width=4, height=3, num_bytes=2000)


def answer(**changes: object) -> Answer:
    fields: dict[str, object] = {
        "index": 0,
        "picture": "a.png",
        "digest": "d",
        "prompt": "p",
        "text": "a red star",
        "token_ids": (1, 2, 3),
        "finish": "stop",
        "ms": {"queue": 0.2, "read": 1.0, "clip": 4.0, "first_token": 10.0, "total": 30.0},
    }
    return Answer(**{**fields, **changes})  # type: ignore[arg-type]


def shown(turn: Turn) -> str:
    return conversation(Chat(picture=PICTURE, turns=(turn,)))


def assert_harmless(html: str) -> None:
    assert "<img src=x" not in html
    assert "onerror=alert(1)>" not in html
    assert "\u202e" not in html
    assert "&lt;img src=x" in html


@pytest.mark.parametrize(
    "html",
    [
        shown(Turn(question=EVIL)),
        shown(Turn(question="q", text=EVIL)),
        shown(Turn(question="q", answer=answer(text=EVIL))),
        shown(Turn(question="q", answer=answer(finish="error", error=AnswerError(code="truncated", message=EVIL)))),
        shown(Turn(question="q", problem=Problem(exit_code=ExitCode.USAGE, http_status=400, sentence=EVIL, hint=EVIL))),
        picture_line(Chat(picture=PickedPicture(source="s", shown="s", name=EVIL, width=1, height=1))),
        picture_line(Chat(picture=PickedPicture(source="s", shown="s", name="n", problem=EVIL))),
        results((Judged(name=EVIL, choice={EVIL: 0.9, "no": 0.1}),), (EVIL, "no"), Rule()),
        results((Judged(name="n", problem=EVIL),), ("yes", "no"), Rule()),
        named(EVIL),
        escaped(EVIL),
    ],
)
def test_whatever_a_user_a_file_or_the_model_says_is_no_markup(html: str) -> None:
    assert_harmless(html)


def test_the_conversation_says_what_to_do_while_it_is_empty() -> None:
    assert "Choose a picture, then ask something about it" in conversation(Chat())
    assert "No picture yet" in picture_line(Chat())


def test_the_conversation_is_a_region_that_screen_readers_follow() -> None:
    html = shown(Turn(question="q", text="a red"))

    assert 'role="log"' in html
    assert 'aria-live="polite"' in html
    assert 'aria-busy="true"' in html, "words that still come are not read out one by one"
    assert "aria-busy" not in shown(Turn(question="q", answer=answer()))


def test_under_an_answer_stand_its_times_tokens_and_speed() -> None:
    words = " ".join(re.sub("<[^>]+>", " ", shown(Turn(question="q", answer=answer()))).split())

    for figure in ("queue 0.2 ms", "read 1.0 ms", "clip 4.0 ms", "first token 10 ms", "total 30 ms", "3 tokens"):
        assert figure in words
    assert "100 tokens/s" in words, "two tokens in the 20 ms after the first"
    assert "encoded once" not in words


def test_a_picture_that_was_kept_encoded_is_said_to_be_encoded_once() -> None:
    assert "picture encoded once" in shown(Turn(question="q", answer=answer(is_reused=True)))


@pytest.mark.parametrize(("unfamiliar", "is_doubted"), [(True, True), (False, False), (None, False)])
def test_an_answer_about_an_unfamiliar_picture_says_so(unfamiliar: bool | None, is_doubted: bool) -> None:
    judged = Judged(name="a", choice={"yes": 0.9, "no": 0.1}, unfamiliar=unfamiliar)
    for html in (
        shown(Turn(question="q", answer=answer(unfamiliar=unfamiliar))),
        results((judged,), ("yes", "no"), Rule()),
    ):
        assert ("does not look like those the model was trained on" in html) is is_doubted


def test_an_answer_that_was_stopped_or_cut_keeps_its_text_and_says_so() -> None:
    stopped = shown(Turn(question="q", answer=answer(finish="error", error=AnswerError(code="cancelled", message=""))))
    cut = shown(Turn(question="q", answer=answer(finish="length")))

    assert "a red star" in stopped
    assert "Stopped" in stopped
    assert "a red star" in cut
    assert "Cut at the limit" in cut


def test_speed_is_not_told_of_a_single_token() -> None:
    assert tokens_per_second(answer(token_ids=(1,))) is None
    assert tokens_per_second(answer(ms={"total": 3.0})) is None


def test_a_chat_forgets_its_oldest_turns_and_no_others() -> None:
    chat = Chat(picture=PICTURE)
    for number in range(MAX_TURNS + 3):
        chat = chat.with_turn(Turn(question=str(number)))

    assert [turn.question for turn in chat.turns] == [str(number) for number in range(3, MAX_TURNS + 3)]


def test_a_new_picture_starts_anew_and_the_same_one_does_not() -> None:
    session = ChatSession()
    session.choose(PICTURE)
    session.begin("run", Turn(question="q"))

    session.choose(PickedPicture(source=PICTURE.source, shown="preview", name="a.png"))
    assert len(session.chat.turns) == 1

    session.choose(PickedPicture(source="/b.png", shown="/b.png", name="b.png"))
    assert session.chat.turns == ()


def test_a_question_that_overtakes_another_closes_it() -> None:
    session = ChatSession()
    session.choose(PICTURE)
    session.begin("first", Turn(question="one"))
    session.begin("second", Turn(question="two"))

    assert [turn.is_open for turn in session.chat.turns] == [False, True]
    assert session.run == "second"


def test_asking_again_takes_the_place_of_the_last_question() -> None:
    session = ChatSession()
    session.choose(PICTURE)
    session.begin("first", Turn(question="one"))
    session.begin("second", Turn(question="one"), is_again=True)

    assert len(session.chat.turns) == 1


def test_clearing_keeps_the_picture() -> None:
    session = ChatSession()
    session.choose(PICTURE)
    session.begin("run", Turn(question="one"))
    session.clear()

    assert session.chat == Chat(picture=PICTURE)
    assert session.run is None


def test_results_count_what_was_decided_and_what_was_not() -> None:
    judged = (
        Judged(name="a", choice={"yes": 0.9, "no": 0.1}),
        Judged(name="b", choice={"yes": 0.5, "no": 0.5}),
        Judged(name="c", problem="cut off"),
        Judged(name="d"),
    )
    words = " ".join(re.sub("<[^>]+>", " ", results(judged, ("yes", "no"), Rule())).split())

    assert "1 yes 1 undecided 1 without an answer 1 under way" in words
    assert "cut off" in words


def test_no_share_is_rounded_to_certainty() -> None:
    assert percent(0.99999) == "> 99.9 %"
    assert percent(0.00001) == "< 0.1 %"
    assert (percent(1.0), percent(0.0), percent(0.25)) == ("100.0 %", "0.0 %", "25.0 %")


def test_numbers_read_as_people_write_them() -> None:
    assert [milliseconds(value) for value in (0.04, 9.94, 37.2, 1250.0)] == ["0.0 ms", "9.9 ms", "37 ms", "1.25 s"]
    assert [size(value) for value in (812, 35_000, 2_400_000)] == ["812 bytes", "35 kB", "2.4 MB"]


def test_a_long_name_loses_its_middle() -> None:
    html = named("a" * 200 + ".png", max_chars=20)

    assert "…" in html
    assert html.endswith("a.png</bdi>")
    assert len(html) < 40
