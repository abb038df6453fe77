"""Text from files is escaped by one rule in both halves, which may not import each other."""

from llm.weights import files
from vision import formats


def test_both_halves_escape_the_same_characters() -> None:
    assert files.UNSAFE_ON_TERMINALS.pattern == formats.UNSAFE_ON_TERMINALS.pattern
    assert files.UNSAFE_ON_TERMINALS.flags == formats.UNSAFE_ON_TERMINALS.flags
    every = "".join(map(chr, range(0x110000)))
    assert files.shown(every, length=len(every)) == formats.shown_text(every)
