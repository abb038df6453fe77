"""The page about 8-bit weights: what is compared, and that it shows the figures that were written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llama_adapter.app.captioning.captioner import Answer
from scripts.int8_measures import VARIANTS, Halves, agreement, compare_logits, mixed_model
from scripts.int8_report import as_markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"
ANSWER = Answer(index=0, picture="x", digest="", prompt="", text="", token_ids=(5, 6, 7), finish="stop")


def test_the_page_is_what_the_figures_make() -> None:
    figures = json.loads((DOCS / "int8.json").read_text(encoding="utf-8"))

    assert as_markdown(figures) == (DOCS / "int8.md").read_text(encoding="utf-8")


def test_agreement_counts_tokens_at_their_places_and_what_one_caption_lacks() -> None:
    expected = [ANSWER, ANSWER]
    answers = [ANSWER, replace(ANSWER, token_ids=(5, 9))]

    assert agreement(answers, expected) == {"captions": 0.5, "tokens": 4 / 6}


def test_errors_of_logits_are_in_their_own_unit() -> None:
    expected = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0]])
    logits = torch.tensor([[1.0, 5.0, 4.0], [3.0, 0.0, 0.0]])

    found = compare_logits(logits, expected)

    assert (found["max_error"], found["mean_error"], found["same_best"]) == (3.0, 0.5, 0.5)
    assert found["relative_error"] == pytest.approx(3 / 30**0.5)


def test_a_variant_has_the_halves_that_it_names() -> None:
    for variant in VARIANTS:
        model = mixed_model(variant)
        for wanted, state in ((variant.decoder, model.decoder_state), (variant.encoder, model.vision_state)):
            assert any(tensor.dtype == torch.int8 for tensor in state.values()) == (wanted == "int8")


def test_forced_logits_are_those_that_lead_to_the_greedy_answer() -> None:
    from llama_adapter.app.captioning.captioner import Captioner
    from llama_adapter.app.models.resources import sample_pictures

    pictures = sorted(str(path) for path in sample_pictures().glob("*.png"))[:3]
    answers = Captioner.load().generate(pictures)
    halves = Halves(VARIANTS[0])

    logits = halves.answer_logits(halves.visual_queries(pictures), [answer.token_ids for answer in answers])

    assert logits.argmax(-1).tolist() == [token for answer in answers for token in answer.token_ids]
