"""Measurements of quantised weights."""

from dataclasses import replace

import pytest
import torch

from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.schemes import QUANTISED, Precision
from llama_adapter.runtime.schemes.state import precision_of
from scripts.bits_report import Halves, Variant, agreement, compare_logits, mixed_model, run_decoder, variants
from scripts.common import sample_files
from tests.bounds import Float64, difference, spread

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


@pytest.mark.parametrize("precision", QUANTISED)
def test_a_variant_has_the_halves_that_it_names(precision: Precision) -> None:
    for variant in variants(precision):
        model = mixed_model(variant)
        for wanted, state in ((variant.decoder, model.decoder_state), (variant.encoder, model.vision_state)):
            assert precision_of(state) == wanted


def test_outliers_do_not_change_what_the_decoder_computes() -> None:
    plain, planted = (mixed_model(Variant(name="", has_outliers=is_planted)) for is_planted in (False, True))
    tokens, query = torch.tensor([[1, 40, 7, 300]]), torch.randn(1, 10, plain.decoder_config.dim)

    logits, largest, limits = [], [], []
    for model in (plain, planted):
        decoder = decoder_from_state(model.decoder_config, model.decoder_state)
        seen = []
        decoder.layers[1].feed_forward.gate_up.register_forward_hook(
            lambda module, inputs, out, seen=seen: seen.append(float(inputs[0].abs().max()))
        )
        with torch.inference_mode():
            hidden = run_decoder(decoder, tokens, decoder.project_prefix(query))
            logits.append(decoder.logits(hidden))
        largest.append(max(seen))
        with torch.inference_mode(), Float64():
            decoder = decoder.double()
            hidden = run_decoder(decoder, tokens, decoder.project_prefix(query.double()))
            limits.append(spread(logits[-1], decoder.logits(hidden)))

    assert difference(*logits) <= max(limits)
    assert largest[1] > 5 * largest[0]


def test_forced_logits_lead_to_the_greedy_answer() -> None:
    pictures = list(map(str, sample_files()[:3]))
    answers = Captioner.load().generate(pictures)
    halves = Halves(mixed_model(Variant(name="float32")))

    logits = halves.answer_logits(halves.visual_queries(pictures), [answer.token_ids for answer in answers])

    assert logits.argmax(-1).tolist() == [token for answer in answers for token in answer.token_ids]
