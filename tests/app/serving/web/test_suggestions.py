"""The suggested questions: those of the embedded model occur in its training, and all fit their buttons."""

import re

import pytest

from llama_adapter.app.serving.web.suggestions import starters

# The sentences of docs/embedded-model.md, with placeholders for the words of its world.
_THING = "(?:circle|square|triangle|star|cross|ring|heart|moon)"
_COLOUR = "(?:red|orange|yellow|green|blue|purple|white|black)"
_KNOWN = (
    "Generate caption of this image",
    r"How many objects are (?:there|in the picture)\?",
    rf"How many (?:{_THING}s|{_COLOUR} objects) are there\?",
    rf"What color is the {_THING}\?",
    rf"What shape is the {_COLOUR} object\?",
    rf"Is the {_THING} large or small\?",
    rf"Where is the {_THING}\?",
    rf"Is there an? {_COLOUR} {_THING}\?",
    rf"Is the {_THING} (?:to the left of|to the right of|above|below) the {_THING}\?",
    rf"What is (?:to the left of|to the right of|above|below) the {_THING}\?",
)


def test_the_embedded_model_is_only_asked_what_it_knows() -> None:
    offer = starters(is_embedded=True, about="a small red star above a large orange ring")

    assert len(offer.prompts) == 8
    for one in (*offer.prompts, *offer.questions):
        assert any(re.fullmatch(known, one.text) for known in _KNOWN), one.text
    assert offer.texts == {"choices": "yes, no"}


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ("", ()),
        ("IMG_2041", ()),
        ("orange ring", ("What color is the ring?", "What shape is the orange object?", "Is there an orange ring?")),
        ("two stars: a red star, a red star", ("Is there a red star?",)),
        ("red star blue star white moon", ("Where is the moon?", "What shape is the red object?")),
    ],
)
def test_questions_about_an_object_are_about_one_of_the_picture(about: str, expected: tuple[str, ...]) -> None:
    texts = [one.text for one in starters(is_embedded=True, about=about).prompts]

    assert texts[:2] == ["Generate caption of this image", "How many objects are in the picture?"]
    assert set(expected) <= set(texts[2:])
    assert bool(texts[2:]) == bool(expected)


@pytest.mark.parametrize("is_embedded", [True, False])
def test_every_question_has_a_short_label_of_its_own(is_embedded: bool) -> None:
    offer = starters(is_embedded=is_embedded)

    for group in (offer.prompts, offer.questions):
        labels = [one.label for one in group]
        assert labels
        assert len(set(labels)) == len(labels)
        assert all(0 < len(label) <= 24 for label in labels)
