"""Packed questions: several questions in one row give the same results as each question alone."""

import copy

import pytest
import torch

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.prompt import format_prompt
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded.decoder_stages import answer_hits, answer_states, prepare
from scripts.train_embedded.packing import Packer
from scripts.train_embedded.questions import Question
from scripts.train_embedded.sizes import build_decoder
from scripts.train_embedded.tokens import train_tokenizer
from tests.bounds import Float64, difference, spread
from tests.llm.toys import forward

QUESTIONS = [
    Question(task="color", text="What color is the star?", answer="red"),
    Question(task="exist", text="Is there an orange cross?", answer="no"),
    Question(task="caption", text="Generate caption of this image", answer="a small red star at the top left"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(path, num_questions=4000)
    return Tokenizer.load(path)


@pytest.mark.slow
def test_tokenizer_keeps_all_text_and_has_pieces_for_yes_and_no(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (1024, 1, 2)
    for text in (format_prompt("What color is the star?") + "red", "Привет,  {мир}\n\n", "x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for word in ("yes", "no", "Yes", "No"):
        assert len(tokenizer.encode_continuation(format_prompt("Is there a red star?"), word)) == 1


def test_packed_tokens_are_those_of_prompt_and_answer_encoded_together(tokenizer: Tokenizer) -> None:
    packed = Packer(tokenizer).pack([QUESTIONS])
    tokens, mask = packed.tokens_BS[0], packed.mask_B1SS[0, 0]
    for index, question in enumerate(QUESTIONS):
        columns = packed.column_N[packed.answer_N == index].tolist()
        whole = tokenizer.encode(format_prompt(question.text) + question.answer)
        assert len(columns) > 1
        for place, column in enumerate(columns, start=len(whole) - len(columns)):
            assert tokens[mask[column]].tolist() == whole[: place + 1]
            assert packed.positions_BS[0, column] == place
        targets = packed.target_N[packed.answer_N == index].tolist()
        assert targets[-1] == tokenizer.eos_id
        assert tokenizer.decode(targets[:-1]).strip() == question.answer


@pytest.fixture
def decoder() -> LlamaAdapterDecoder:
    """A random decoder with open gates."""
    torch.manual_seed(0)
    decoder = build_decoder()
    with torch.no_grad():
        decoder.adapter.gates.fill_(0.5)
    return decoder


def test_the_training_pass_gives_the_states_of_the_decoder(tokenizer: Tokenizer, decoder: LlamaAdapterDecoder) -> None:
    visual_query = torch.randn(2, 10, 192)
    packed = Packer(tokenizer).pack([QUESTIONS, QUESTIONS[1:]])
    prefix = decoder.project_prefix(visual_query)
    hidden = decoder(packed.tokens_BS, packed.positions_BS, packed.mask_B1SS, prefix)
    with Float64():
        double = copy.deepcopy(decoder).double()
        prefix = double.project_prefix(visual_query.double())
        exact = double(packed.tokens_BS, packed.positions_BS, packed.mask_B1SS, prefix)
    prepare(decoder)
    states = answer_states(decoder, visual_query, packed)
    assert difference(states, hidden[packed.row_N, packed.column_N]) <= spread(hidden, exact)


def test_an_untrained_decoder_is_not_scored_as_right(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    hits = answer_hits(build_decoder(), torch.randn(1, 10, 192), Packer(tokenizer).pack([QUESTIONS]))
    assert set(hits) == {"color", "exist", "caption"}
    assert not any(any(values) for values in hits.values())


def test_biases_of_keys_and_values_get_no_gradient() -> None:
    decoder = build_decoder()
    prefix = decoder.project_prefix(torch.randn(1, 10, 192))
    forward(decoder, torch.randint(0, 1024, (1, 6)), prefix).square().sum().backward()
    gradient = decoder.layers[0].attention.qkv.bias.grad
    assert gradient[:192].abs().max() > 0
    assert not gradient[192:].any()
