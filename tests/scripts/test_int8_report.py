"""Measures of 8-bit weights."""

from dataclasses import replace

import pytest
import torch

from llama_adapter.app.captioning.captioner import Answer, Captioner
from scripts.common import sample_files
from scripts.int8_report import VARIANTS, Halves, agreement, compare_logits, mixed_model

ANSWER = Answer(index=0, picture="x", digest="", prompt="", text="", token_ids=(5, 6, 7), finish="stop")


def test_agreement_of_captions_and_tokens() -> None:
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


def test_forced_logits_lead_to_the_greedy_answer() -> None:
    pictures = list(map(str, sample_files()[:3]))
    answers = Captioner.load().generate(pictures)
    halves = Halves(VARIANTS[0])

    logits = halves.answer_logits(halves.visual_queries(pictures), [answer.token_ids for answer in answers])

    assert logits.argmax(-1).tolist() == [token for answer in answers for token in answer.token_ids]
