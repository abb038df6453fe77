"""Stage 3: the visual-query blocks learn to produce the scene code: visual query k describes object k."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.code_stage import SceneCode
from scripts.train_embedded.features import feature_batch
from scripts.train_embedded.loop import Optimizers, autocast, train
from scripts.train_embedded.pictures import MAX_THINGS, NOTHING, UNKNOWN, Chunks
from scripts.train_embedded.sizes import build_encoder, is_hidden_matrix
from scripts.train_embedded.vision_stage import load_tower

BATCH = 24


def run(*, data: Path, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 3) -> None:
    """Train the visual-query blocks on the tower's features; writes slots.pt into `folder`."""
    torch.manual_seed(seed)
    encoder = build_encoder()
    load_tower(encoder, folder)
    named, odd = Chunks(data, "scene", "features"), Chunks(data, "odd", "features")
    optimizers = Optimizers([(encoder.query, 1.0)], lr=lr, is_hidden=is_hidden_matrix)
    train(
        "slots",
        {"query": encoder.query},
        optimizers,
        partial(_batch_at, named, odd, seed=seed),
        partial(read_scenes, encoder.query, SceneCode()),
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate(encoder, data),
    )


def slot_loss(code: SceneCode, visual_query_BQD: Tensor, labels_BO4: Tensor) -> Tensor:
    """Distance to the code for scenes in which every kind has a name, and cross entropies of all named labels."""
    known_B = (labels_BO4 != UNKNOWN).flatten(1).all(1)
    target_BQD = code(torch.where(labels_BO4 == UNKNOWN, NOTHING, labels_BO4))
    visual_query_BQD = visual_query_BQD.float()
    distance_B = (visual_query_BQD - target_BQD).square().mean((1, 2))
    loss: Tensor = 4 * (distance_B * known_B).sum() / known_B.sum().clamp(min=1)
    for scores, label in code.readings(visual_query_BQD, labels_BO4):
        loss = loss + F.cross_entropy(scores.flatten(0, 1), label.flatten(), ignore_index=UNKNOWN)
    return loss


def readings_right(visual_query_BQD: Tensor, labels_BO4: Tensor) -> Tensor:
    """(B, 3) bool: whether everything about an object, or its absence, is read correctly."""
    readings = SceneCode().readings(visual_query_BQD.float(), labels_BO4)
    return torch.stack([scores.argmax(-1) == label for scores, label in readings]).all(0)


@torch.no_grad()
def evaluate(encoder: PictureEncoder, data: Path, *, count: int = 1000) -> dict[str, float]:
    """The share of objects (and of whole scenes) that the visual queries describe correctly; also with new pairs."""
    scores: dict[str, float] = {}
    for kind in ("check", "pair"):
        chunks = Chunks(data, kind, "features")
        seen, target = chunks.arrays[0][:count], torch.from_numpy(chunks.labels[0][:count].astype(np.int64))
        with autocast():
            visual_query = torch.cat(
                [encoder.query(torch.from_numpy(part.astype(np.float32))) for part in np.split(seen, 10)]
            )
        right = readings_right(visual_query, target)
        there = (target[..., 3] != NOTHING)[:, :MAX_THINGS]
        scores[f"{kind} objects"] = float(right[there].float().mean())
        scores[f"{kind} scenes"] = float(right.all(1).float().mean())
    return scores


def read_scenes(
    read: Callable[[Tensor], Tensor], code: SceneCode, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the visual queries that `read` computes from a batch of inputs and labels."""
    seen, labels = batch
    with autocast():
        visual_query = read(seen)
    loss = slot_loss(code, visual_query, labels)
    return loss, {"loss": float(loss.detach())}


def _batch_at(named: Chunks, odd: Chunks, step: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """A batch with three quarters normal pictures, one quarter with unnamed kinds."""
    normal = feature_batch(named, step, batch_size=BATCH * 3 // 4, seed=seed)
    others = feature_batch(odd, step, batch_size=BATCH // 4, seed=seed + 1)
    return torch.cat([normal[0], others[0]]), torch.cat([normal[1], others[1]])
