"""Labels, the scene code, gates, and the command line."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded import decoder_stages, picture_stages, pictures
from scripts.train_embedded.__main__ import main
from scripts.train_embedded.decoder_stages import SceneCode, close_gates, open_gates
from scripts.train_embedded.loop import trained
from scripts.train_embedded.picture_stages import slot_loss
from scripts.train_embedded.pictures import UNKNOWN, scene_to_labels
from scripts.train_embedded.questions import CLASSES
from scripts.train_embedded.sizes import build_decoder
from scripts.train_embedded.tokens import train_tokenizer
from scripts.train_embedded.world import sample_scene

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


def test_a_decoder_keeps_its_pieces_under_another_tokenizer(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "tokenizer.model", num_questions=1000)
    other = Tokenizer.load(tmp_path / "tokenizer.model")
    own = Tokenizer.load(BUNDLE / "tokenizer.model")
    before = decoder_stages.take_decoder(BUNDLE, own)
    after = decoder_stages.take_decoder(BUNDLE, other)
    for text in ("star", "red", "\n"):
        new, old = other.encode(text)[-1], own.encode(text)[-1]
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

    whole = trained(tmp_path / "run", "reading", "encoder")
    for stage, part in (("vision", "clip"), ("slots", "query")):
        before = trained(tmp_path / "run", stage, part)
        change = max(float((whole[f"{part}.{name}"] - weight).abs().max()) for name, weight in before.items())
        assert 0 < change < 0.01
