"""Stop texts end a stream where they begin, however the stream is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.captioning.active_request import StopStrings


def through(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stopping = StopStrings(stops)
    out = "".join(stopping.push(piece) for piece in pieces)
    return out + stopping.flush(), stopping.is_hit


@given(
    st.lists(st.text(alphabet="ab.", max_size=4), max_size=8),
    st.lists(st.text("ab.", min_size=1, max_size=3), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string_in_any_split(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    # The stop text that is complete first ends the text. Among those complete at once, the one that begins first does.
    end = min((whole.find(stop) + len(stop) for stop in stops if stop in whole), default=None)
    if end is None:
        assert through(stops, pieces) == (whole, False)
        return
    text, is_hit = through(stops, pieces)
    assert is_hit
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert any(whole.startswith(stop, len(text)) for stop in stops)


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    stopping = StopStrings(["###"])

    assert stopping.push("a red star#") == "a red star"
    assert stopping.push("#") == ""
    assert stopping.push("!") == "##!"
    assert not stopping.is_hit
    for none in ([], [""]):
        assert StopStrings(none).push("a #") == "a #"
