"""Labels, the scene code and gates."""

import numpy as np
import torch
from torch import Tensor

from scripts.train_embedded.code_stage import SceneCode, close_gates, open_gates
from scripts.train_embedded.pictures import UNKNOWN, labels_to_scene, scene_to_labels
from scripts.train_embedded.sizes import build_decoder
from scripts.train_embedded.slot_stage import slot_loss
from scripts.train_embedded.world import sample_scene


def _labels(count: int) -> Tensor:
    rng = np.random.default_rng(0)
    return torch.from_numpy(
        np.stack([scene_to_labels(sample_scene(rng, placed=False)) for _ in range(count)]).astype(np.int64)
    )


def test_labels_name_a_scene_completely() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        scene = sample_scene(rng, placed=False)
        assert labels_to_scene(scene_to_labels(scene)) == scene


def test_the_scene_code_can_be_read_back() -> None:
    code, labels = SceneCode(), _labels(64)
    for scores, label in code.readings(code(labels), labels):
        assert torch.equal(scores.argmax(-1), label)


def test_the_code_itself_has_no_slot_loss_worth_mentioning_and_noise_has() -> None:
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
