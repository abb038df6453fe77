"""The captioner's promises, on the reference's tiny random checkpoints."""

import io
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app import Answer, Captioner, RawPrompt, TextDelta
from app.captioner import work_items
from app.clock import STAGES
from llm.errors import PromptTooLongError
from llm.prompt import format_prompt
from tests.app.golden import GOLDEN, model_options

PICTURES = sorted((GOLDEN / "images").iterdir())
PROMPTS = ["Describe the image.", ("Is it red?", "Look at the border."), "What is shown in this picture?", ("", "")]


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner.load(**model_options(), batch_size=4)


def jobs(count: int = 16) -> list[tuple[Path, object]]:
    return [(PICTURES[index % len(PICTURES)], PROMPTS[index % len(PROMPTS)]) for index in range(count)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16])
def test_answers_do_not_depend_on_batch_order_or_bad_neighbours(tmp_path: Path, batch_size: int) -> None:
    alone = Captioner.load(**model_options(), batch_size=1)
    expected = {
        index: alone.generate([picture], [prompt], max_new_tokens=12)[0].token_ids
        for index, (picture, prompt) in enumerate(jobs())
    }
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(PICTURES[0].read_bytes()[:900])
    shuffled = [(index, *job) for index, job in enumerate(jobs())]
    shuffled += [(-1, bad, PROMPTS[0]), (-2, tmp_path / "missing.png", PROMPTS[1]), (-3, bad, PROMPTS[2])]
    random.Random(batch_size).shuffle(shuffled)
    batched = Captioner.load(**model_options(), batch_size=batch_size)
    answers = batched.generate(
        [picture for _, picture, _ in shuffled], [prompt for _, _, prompt in shuffled], max_new_tokens=12
    )
    for (index, _, _), answer in zip(shuffled, answers, strict=True):
        if index < 0:
            assert answer.finish == "error"
            assert answer.error is not None
            assert answer.text == ""
        else:
            assert answer.token_ids == expected[index]


def test_streamed_pieces_put_together_are_the_answers(captioner: Captioner) -> None:
    pictures = [picture for picture, _ in jobs(6)]
    pieces: dict[int, str] = defaultdict(str)
    streamed: dict[int, Answer] = {}
    for event in captioner.stream(pictures, "Describe the image.", max_new_tokens=10, temperature=0.9, seed=5):
        if isinstance(event, TextDelta):
            assert event.index not in streamed, "text after the answer"
            pieces[event.index] += event.text
        else:
            streamed[event.index] = event
    whole = captioner.generate(pictures, "Describe the image.", max_new_tokens=10, temperature=0.9, seed=5)
    assert {index: answer.text for index, answer in streamed.items()} == dict(pieces)
    assert [streamed[index].token_ids for index in range(6)] == [answer.token_ids for answer in whole]


def test_equal_seeds_draw_equal_answers_and_others_differ(captioner: Captioner) -> None:
    def draw(seed: int) -> list[str]:
        answers = captioner.generate(PICTURES[:3], "Describe the image.", temperature=1.5, top_p=1.0, seed=seed)
        return [answer.text for answer in answers]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_prompt_may_come_in_four_forms(captioner: Captioner) -> None:
    text = format_prompt("Describe the image.")
    forms = [
        "Describe the image.",
        ("Describe the image.", None),
        RawPrompt(text),
        captioner.tokenizer.encode(text),
    ]
    answers = captioner.generate([PICTURES[0]] * 4, forms, max_new_tokens=8)
    assert len({answer.token_ids for answer in answers}) == 1


def test_a_picture_may_come_in_four_forms(captioner: Captioner) -> None:
    path = GOLDEN / "images/shapes_200x300.jpg"
    data = path.read_bytes()
    forms = [str(path), path, data, Image.open(io.BytesIO(data))]
    answers = captioner.generate(forms, max_new_tokens=8)
    assert len({answer.token_ids for answer in answers}) == 1
    assert [answer.picture for answer in answers] == [str(path), str(path), "picture 2", "picture 3"]


def test_upright_orientation_is_the_default_and_changes_the_answer_of_a_turned_picture(
    captioner: Captioner,
) -> None:
    turned = GOLDEN / "images/exif6_160x120.jpg"
    stored = Image.fromarray(np.asarray(Image.open(turned).convert("RGB")))  # without EXIF
    upright = stored.transpose(Image.Transpose.ROTATE_270)
    ignoring = Captioner.load(**model_options(), exif="ignore")
    by_file, by_hand = captioner.generate([turned, upright], max_new_tokens=8)
    as_stored, by_hand_as_stored = ignoring.generate([turned, stored], max_new_tokens=8)
    assert by_file.token_ids == by_hand.token_ids
    assert as_stored.token_ids == by_hand_as_stored.token_ids
    assert as_stored.token_ids != by_file.token_ids


def test_choices_get_probabilities_that_sum_to_one_and_the_best_is_the_text(captioner: Captioner) -> None:
    for choices in (["Yes", "No"], ["red", "a blue circle", "nothing at all"]):
        answers = captioner.generate(PICTURES[:5], "Is it red?", choices=choices)
        for answer in answers:
            assert answer.finish == "choice"
            assert answer.choice is not None
            assert list(answer.choice) == choices
            assert sum(answer.choice.values()) == pytest.approx(1.0)
            assert answer.text == max(answer.choice, key=lambda text: answer.choice[text])  # type: ignore[index]
            assert captioner.tokenizer.decode(answer.token_ids) == answer.text


def test_choices_weigh_what_greedy_decoding_says_first(captioner: Captioner) -> None:
    """The likeliest single-token choice among all first tokens is the one that would be generated."""
    generated = captioner.generate(PICTURES[:3], RawPrompt("Is it red?"), max_new_tokens=1)
    for picture, answer in zip(PICTURES, generated, strict=False):
        others = [captioner.tokenizer.decode([token]) for token in (300, 301, 302)]
        choices = [answer.text, *(text for text in others if text != answer.text)]
        scored = captioner.generate([picture], [RawPrompt("Is it red?")], choices=choices)[0]
        assert scored.text == answer.text


@pytest.mark.parametrize("choices", [["Yes"], ["Yes", "Yes"], []])
def test_choices_must_be_two_different_answers(captioner: Captioner, choices: list[str]) -> None:
    with pytest.raises(ValueError, match="at least two different"):
        captioner.generate(PICTURES[:1], choices=choices)


def test_a_prompt_beyond_the_context_is_refused_before_any_picture_is_read() -> None:
    captioner = Captioner.load(**model_options(), context=40)
    with pytest.raises(PromptTooLongError, match="the context holds 40"):
        captioner.generate([Path("not read")])


def test_counts_that_do_not_match_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="3 pictures came with 2 prompts"):
        work_items(PICTURES[:3], ["a", "b"], default_prompt="")
    with pytest.raises(ValueError, match="brackets"):
        work_items("picture.png", None, default_prompt="")


def test_an_empty_batch_has_no_answers(captioner: Captioner) -> None:
    assert captioner.generate([]) == []


def test_a_closed_stream_leaves_the_captioner_usable(captioner: Captioner) -> None:
    expected = captioner.generate(PICTURES[:3], max_new_tokens=6)
    stream = captioner.stream(PICTURES[:6], max_new_tokens=30)
    next(stream)
    stream.close()
    again = captioner.generate(PICTURES[:3], max_new_tokens=6)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in expected]


def test_stage_times_cover_the_run(captioner: Captioner) -> None:
    clock = captioner.profile_clock()
    captioner.generate(PICTURES[:6], max_new_tokens=20, clock=clock)
    assert set(clock.seconds) == set(STAGES)
    assert all(clock.seconds[stage] > 0 for stage in ("read", "clip", "pre", "forward", "post", "decode"))
