"""Labels, the scene code, gates, packed questions, and the command line: stages go on from each other."""

import copy
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.llm.conversation import format_prompt
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded import decoder_stages, picture_stages, pictures
from scripts.train_embedded.__main__ import main
from scripts.train_embedded.decoder_stages import (
    SceneCode,
    answer_hits,
    answer_states,
    close_gates,
    open_gates,
    prepare,
)
from scripts.train_embedded.loop import trained
from scripts.train_embedded.packing import Packer
from scripts.train_embedded.picture_stages import slot_loss
from scripts.train_embedded.pictures import UNKNOWN, scene_to_labels
from scripts.train_embedded.questions import CLASSES, Question
from scripts.train_embedded.sizes import build_decoder, build_encoder
from scripts.train_embedded.tokens import train_tokenizer
from scripts.train_embedded.world import sample_scene
from tests.bounds import Float64, difference, spread
from tests.llm.toys import forward

BUNDLE = Path(__file__).parents[3] / "assets" / "embedded"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLE / "tokenizer.model")


def test_the_scene_code_can_be_read_back_and_its_slot_loss_is_small() -> None:
    rng, code = np.random.default_rng(0), SceneCode()
    scenes = [scene_to_labels(sample_scene(rng, placed=False)) for _ in range(64)]
    labels = torch.from_numpy(np.stack(scenes).astype(np.int64))
    right, noise = code(labels), torch.randn(64, 10, 192)
    for scores, label in code.readings(right, labels):
        assert torch.equal(scores.argmax(-1), label)
    assert slot_loss(code, right, labels) < 1.0 < slot_loss(code, noise, labels)
    hidden = labels[:8].clone()
    hidden[0, 0, 0] = UNKNOWN
    assert slot_loss(code, right[:8], hidden) < 1.0, "unnamed kinds do not enter it"


def test_closed_gates_are_the_tanh_of_the_trained_ones() -> None:
    decoder = build_decoder()
    open_gates(decoder)
    with torch.no_grad():
        decoder.adapter.parametrizations.gates.original.fill_(2.0)
    close_gates(decoder)
    torch.testing.assert_close(decoder.state_dict()["adapter.gates"], torch.full((3, 6), 2.0).tanh())


def test_code_stage_trains_decoder_and_head(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_stages, "BATCH", 1)
    monkeypatch.setattr(decoder_stages, "QUESTIONS", 2)
    monkeypatch.setattr(decoder_stages, "evaluate", lambda *_, **__: {"caption": 0.5})

    decoder_stages.run_code(tokenizer=tokenizer, folder=tmp_path, num_steps=1)

    trained = torch.load(tmp_path / "code.pt", weights_only=True)["optimizers"][0]["state"].values()
    moments = [state["exp_avg"] for state in trained if len(state["exp_avg"]) == sum(CLASSES.values())]
    assert len(moments) == 2  # for the head's weights and biases
    assert all(moment.any() for moment in moments)


def test_never_drawn_pairs_are_sampled_on_request() -> None:
    rng = np.random.default_rng(0)
    for never_drawn, expected in (("without", {False}), ("with", {True}), ("any", {False, True})):
        scenes = [decoder_stages.sample_questions_scene(rng, never_drawn=never_drawn) for _ in range(60)]
        assert {any(thing.is_never_drawn for thing in scene) for scene in scenes} == expected


def test_number_of_steps_must_be_positive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["code", "--steps=0", "--work", str(tmp_path)])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


def test_wording_stage_goes_on_from_the_bundle(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_stages, "BATCH", 1)
    monkeypatch.setattr(decoder_stages, "ROW_TOKENS", 60)
    monkeypatch.setattr(decoder_stages, "evaluate", lambda *_, **__: {"caption": 0.5})

    decoder_stages.run_wording(bundle=BUNDLE, tokenizer=tokenizer, folder=tmp_path, num_steps=1)

    before = load_bundle(BUNDLE, dtype=torch.float32).decoder_state
    after = trained(tmp_path, "wording", "decoder")
    change = (after["layers.0.attention.out.weight"] - before["layers.0.attention.out.weight"]).abs().max()
    assert 0 < change < 0.01


def test_a_decoder_keeps_its_pieces_under_another_tokenizer(tokenizer: Tokenizer, trained_tokenizer: Tokenizer) -> None:
    before, after = (decoder_stages.take_decoder(BUNDLE, one) for one in (tokenizer, trained_tokenizer))
    for text in ("star", "red", "\n"):
        old, new = (one.encode(text)[-1] for one in (tokenizer, trained_tokenizer))
        assert torch.equal(after.embedding.weight[new], before.embedding.weight[old])
        assert torch.equal(after.head.weight[new], before.head.weight[old])


def test_wording_stage_mixes_known_other_and_outside_questions() -> None:
    rng = np.random.default_rng(0)
    scene = sample_scene(rng, num_objects=3, placed=False)
    asked = decoder_stages.ask_all(scene, rng, count=400)
    tasks = Counter(question.task for question in asked)
    assert set(tasks) >= {"caption", "exist", "outside"}
    assert 25 < tasks["outside"] < 75
    assert 60 < sum(bool(question.about) for question in asked) < 150  # those in the known words


def test_picture_stages_go_on_from_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pictures, picture_stages):
        monkeypatch.setattr(module, "CHUNK_PICTURES", 20)
    monkeypatch.setattr("scripts.train_embedded.__main__.CROWD_CHUNKS", 1)
    monkeypatch.setattr("scripts.train_embedded.__main__.CHUNKS", dict.fromkeys(pictures.KINDS, 1))
    monkeypatch.setattr(picture_stages, "evaluate_reading", lambda _: {"check scenes": 0.5})

    for stage in ("draw", "vision", "features", "slots", "reading"):
        assert main([stage, "--work", str(tmp_path), "--steps=1", f"--threads={torch.get_num_threads()}"]) == 0

    whole, untrained = trained(tmp_path / "run", "reading", "encoder"), build_encoder().state_dict()
    for stage, part in (("vision", "clip"), ("slots", "query")):
        before = trained(tmp_path / "run", stage, part)
        change, otherwise = (
            max(float((state[f"{part}.{name}"] - weight).abs().max()) for name, weight in before.items())
            for state in (whole, untrained)
        )
        assert 0 < change < otherwise / 4  # a stage that started from scratch would have other random weights


QUESTIONS = [
    Question(task="color", text="What color is the star?", answer="red"),
    Question(task="exist", text="Is there an orange cross?", answer="no"),
    Question(task="caption", text="Generate caption of this image", answer="a small red star at the top left"),
]


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(path, num_questions=1500)
    return Tokenizer.load(path)


@pytest.mark.slow
def test_tokenizer_keeps_all_text_and_has_pieces_for_yes_and_no(trained_tokenizer: Tokenizer) -> None:
    assert (trained_tokenizer.vocab_size, trained_tokenizer.bos_id, trained_tokenizer.eos_id) == (1024, 1, 2)
    for text in (format_prompt("What color is the star?") + "red", "Привет,  {мир}\n\n", "x"):
        assert trained_tokenizer.decode(trained_tokenizer.encode(text)) == text
    for word in ("yes", "no", "Yes", "No"):
        assert len(trained_tokenizer.encode_continuation(format_prompt("Is there a red star?"), word)) == 1


def test_packed_tokens_are_those_of_prompt_and_answer_encoded_together(trained_tokenizer: Tokenizer) -> None:
    packed = Packer(trained_tokenizer).pack([QUESTIONS])
    tokens, mask = packed.tokens_BS[0], packed.mask_B1SS[0, 0]
    for index, question in enumerate(QUESTIONS):
        columns = packed.column_N[packed.answer_N == index].tolist()
        whole = trained_tokenizer.encode(format_prompt(question.text) + question.answer)
        assert len(columns) > 1
        for place, column in enumerate(columns, start=len(whole) - len(columns)):
            assert tokens[mask[column]].tolist() == whole[: place + 1]
            assert packed.positions_BS[0, column] == place
        targets = packed.target_N[packed.answer_N == index].tolist()
        assert targets[-1] == trained_tokenizer.eos_id
        assert trained_tokenizer.decode(targets[:-1]).strip() == question.answer


@pytest.fixture
def decoder() -> LlamaAdapterDecoder:
    """A random decoder with open gates."""
    torch.manual_seed(0)
    decoder = build_decoder()
    with torch.no_grad():
        decoder.adapter.gates.fill_(0.5)
    return decoder


def test_the_training_pass_gives_the_states_of_the_decoder(
    trained_tokenizer: Tokenizer, decoder: LlamaAdapterDecoder
) -> None:
    visual_query = torch.randn(2, 10, 192)
    packed = Packer(trained_tokenizer).pack([QUESTIONS, QUESTIONS[1:]])
    prefix = decoder.project_prefix(visual_query)
    hidden = decoder(packed.tokens_BS, packed.positions_BS, packed.mask_B1SS, prefix)
    with Float64():
        double = copy.deepcopy(decoder).double()
        prefix = double.project_prefix(visual_query.double())
        exact = double(packed.tokens_BS, packed.positions_BS, packed.mask_B1SS, prefix)
    prepare(decoder)
    states = answer_states(decoder, visual_query, packed)
    assert difference(states, hidden[packed.row_N, packed.column_N]) <= spread(hidden, exact)


def test_an_untrained_decoder_is_not_scored_as_right(trained_tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    hits = answer_hits(build_decoder(), torch.randn(1, 10, 192), Packer(trained_tokenizer).pack([QUESTIONS]))
    assert set(hits) == {"color", "exist", "caption"}
    assert not any(any(values) for values in hits.values())


def test_biases_of_keys_and_values_get_no_gradient() -> None:
    decoder = build_decoder()
    prefix = decoder.project_prefix(torch.randn(1, 10, 192))
    forward(decoder, torch.randint(0, 1024, (1, 6)), prefix).square().sum().backward()
    gradient = decoder.layers[0].attention.qkv.bias.grad
    assert gradient[:192].abs().max() > 0
    assert not gradient[192:].any()
