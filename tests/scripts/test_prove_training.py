"""The data of the training experiments: what new questions mean."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.training.run_log import COLUMNS
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.vision.weights import build_vision
from scripts.train_embedded.world import COLOR_NAMES, scene_from_words
from scripts.training_proofs.bases import first_steps, write_colors, write_start
from scripts.training_proofs.commands import read_curve
from scripts.training_proofs.new_questions import NEW_TASKS, write_drawings


def test_new_questions_have_the_answer_that_they_mean() -> None:
    rng = np.random.default_rng(4)
    words = (
        ("small", "red", "star", "top left"),
        ("large", "blue", "ring", "top right"),
        ("small", "white", "moon", "bottom right"),
    )
    star, ring, moon = words
    for task, things, wanted in (
        ("warm", words, {"star": "yes", "ring": "no"}),
        ("corners", (star, moon), {"": "yes"}),
        ("corners", (star, ring), {"": "no"}),
    ):
        asked = [NEW_TASKS[task].make(scene_from_words(things), rng) for _ in range(60)]
        found = {(question.text, question.answer) for question in asked if question is not None}
        assert {answer for _, answer in found} == set(wanted.values())
        assert all(any(name in text and answer == wanted[name] for name in wanted) for text, answer in found)


def test_drawings_for_a_new_task_are_sound_data_with_old_questions_beside(tmp_path: Path) -> None:
    write_drawings(tmp_path, "corners", counts=(4, 2, 3), seed=0)

    new, mixed = (read_examples(str(tmp_path / f"{name}.jsonl")) for name in ("new", "mixed"))
    for found in (new, mixed):
        found.require_sound()
    assert [example.split for example in new.examples] == ["train"] * 4 + ["validation"] * 2 + ["test"] * 3
    assert len({example.digest for example in new.examples}) == 9
    old = [example for example in mixed.examples if example.part == "old"]
    assert len(mixed.examples) - len(old) == 9
    assert 6 <= len(old) <= 12
    assert "test" not in {example.split for example in old}


def test_colors_are_sound_data(tmp_path: Path) -> None:
    found = read_examples(str(write_colors(tmp_path, counts=(6, 2, 3))))

    found.require_sound()
    assert [example.split for example in found.examples] == ["train"] * 6 + ["validation"] * 2 + ["test"] * 3
    assert {example.answers[0] for example in found.examples} <= set(COLOR_NAMES)


def test_a_start_has_the_embedded_eye_with_a_new_last_projection(tmp_path: Path) -> None:
    write_start(embedded_model(), tmp_path / "start.pth")

    adapter, bundle = open_adapter(tmp_path / "start.pth"), load_bundle(embedded_model(), dtype=torch.float32)
    clip, heads = open_clip(str(embedded_model())), bundle.vision_config.query.num_heads
    config, state = build_vision(adapter.visual, name="start", clip=clip, visual_heads=heads)
    new = {name for name in bundle.vision_state if not torch.equal(state[name], bundle.vision_state[name])}
    assert config.query == bundle.vision_config.query
    assert new == {
        f"query.output_{part}" for part in ("projection.weight", "projection.bias", "norm.weight", "norm.bias")
    }
    assert not any(tensor.any() for name, tensor in adapter.llama.items() if name.endswith("gate"))


def test_the_first_step_of_a_level_is_the_first_evaluation_that_reaches_it() -> None:
    curve = [{"step": step, "validation_score": score} for step, score in ((0, 0.0), (15, 0.6), (30, 0.4), (45, 0.8))]

    assert first_steps(curve) == [15, 45, None]


def test_the_curve_of_a_log_has_a_point_for_each_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 2.5}]
    lines = [COLUMNS, *([row.get(name, "") for name in COLUMNS] for row in rows)]
    log = tmp_path / "log.csv"
    log.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))

    assert read_curve(log) == [{"step": 2, "loss": 2.5, "validation_loss": 2.5}]
    with pytest.raises(ValueError, match="has no evaluations"):
        read_curve(tmp_path / "no_log.csv")
