"""Natural order of names: numbers are compared by value."""

import re

from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.pictures.inputs import natural_key

# File names: any characters except the null character, with many digits.
NAMES = st.text(st.one_of(st.sampled_from("0123456789aAß_. \x01"), st.characters(exclude_characters="\0")), max_size=12)


def plain_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """The intended order: numbers before letters, numbers by value, letters without case, then the name itself."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part.casefold()) for part in parts], name


@given(NAMES, NAMES)
def test_the_order_of_two_names_is_that_of_numbers_and_letters(one: str, other: str) -> None:
    assert (natural_key(one) < natural_key(other)) == (plain_key(one) < plain_key(other))


def test_numbers_count_by_value_whatever_their_length() -> None:
    names = ["a0", "a00", "a1", "a2", "a02", "a10", "a" + "9" * 5000, "a1" + "0" * 5000]
    assert sorted(set(names), key=natural_key) == ["a0", "a00", "a1", "a02", "a2", *names[5:]]
