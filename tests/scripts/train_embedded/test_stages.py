"""Labels, the scene code and gates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded import code_stage, text_stage
from scripts.train_embedded.code_stage import SceneCode, close_gates, open_gates
from scripts.train_embedded.focus import CLASSES
from scripts.train_embedded.pictures import UNKNOWN, labels_to_scene, scene_to_labels
from scripts.train_embedded.sizes import build_decoder
from scripts.train_embedded.slot_stage import slot_loss
from scripts.train_embedded.world import sample_scene


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[3] / "assets" / "embedded" / "tokenizer.model")


def _labels(count: int) -> Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(
        np.stack([scene_to_labels(sample_scene(rng, placed=False)) for _ in range(count)]).astype(np.int64)
    )


def shrink(monkeypatch: pytest.MonkeyPatch, stage: Any) -> None:
    """One scene with two questions a batch, no evaluation, and no Muon, which is slow without bfloat16 arithmetic."""
    monkeypatch.setattr(stage, "is_hidden_matrix", lambda name: False)
    monkeypatch.setattr(stage, "BATCH", 1)
    monkeypatch.setattr(stage, "QUESTIONS", 2)
    monkeypatch.setattr(stage, "evaluate", lambda *_: {})


def test_labels_name_a_scene_completely() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        scene = sample_scene(rng, placed=False)
        assert labels_to_scene(scene_to_labels(scene)) == scene


def test_the_scene_code_can_be_read_back() -> None:
    code, labels = SceneCode(), _labels(64)
    for scores, label in code.readings(code(labels), labels):
        assert torch.equal(scores.argmax(-1), label)


def test_slot_loss_is_small_for_the_code_and_large_for_noise() -> None:
    code, labels = SceneCode(), _labels(64)
    right, noise = code(labels), torch.randn(64, 10, 192)
    assert slot_loss(code, right, labels) < 1.0 < slot_loss(code, noise, labels)


def test_unnamed_kinds_do_not_enter_the_slot_loss() -> None:
    code, labels = SceneCode(), _labels(8)
    spoken = code(labels)
    hidden = labels.clone()
    hidden[0, 0, 0] = UNKNOWN
    assert torch.isfinite(slot_loss(code, spoken, hidden))
    assert slot_loss(code, spoken, hidden) < 1.0


def test_closed_gates_are_the_tanh_of_the_trained_ones() -> None:
    decoder = build_decoder()
    open_gates(decoder)
    with torch.no_grad():
        decoder.adapter.parametrizations.gates.original.fill_(2.0)
    close_gates(decoder)
    torch.testing.assert_close(decoder.state_dict()["adapter.gates"], torch.full((3, 6), 2.0).tanh())


@pytest.mark.parametrize(("variant", "learned"), [("as-it-is", True), ("without-words", False)])
def test_variant_without_words_does_not_train_the_head(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, variant: str, learned: bool
) -> None:
    shrink(monkeypatch, code_stage)
    code_stage.run_variant(variant, tokenizer=tokenizer, folder=tmp_path, num_steps=1)
    trained = torch.load(tmp_path / f"code-{variant}.pt", weights_only=True)["optimizers"][0]["state"]
    moments = [state["exp_avg"] for state in trained.values() if len(state["exp_avg"]) == sum(CLASSES.values())]
    assert len(moments) == 2  # of the head's weights and biases
    assert all(bool(moment.any()) == learned for moment in moments)


def test_text_stage_trains_the_llama_only(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, text_stage)
    torch.manual_seed(6)
    before = build_decoder().state_dict()
    text_stage.run(tokenizer=tokenizer, folder=tmp_path, num_steps=1, seed=6)
    after = torch.load(tmp_path / "text.pt", weights_only=True)["modules"]["decoder"]

    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"embedding.weight", "head.weight", "layers.0.attention.qkv.weight"} <= moved
    assert not [name for name in moved if name.startswith("adapter.")]
    assert not after["adapter.gates"].any()


def test_never_drawn_pairs_are_sampled_on_request() -> None:
    rng = np.random.default_rng(0)
    for never_drawn, expected in (("without", {False}), ("with", {True}), ("any", {False, True})):
        scenes = [code_stage.sample_questions_scene(rng, never_drawn=never_drawn) for _ in range(60)]
        assert {any(thing.is_never_drawn for thing in scene) for scene in scenes} == expected
