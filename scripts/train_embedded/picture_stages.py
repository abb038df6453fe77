"""The stages of the picture half: the tower alone, the visual-query blocks alone, and both together.

`vision`: for every patch, the CLIP tower learns to classify the object there and the object's cell. `slots`: the
visual-query blocks learn to produce the scene code from the tower's features, which are computed once per picture:
visual query k describes object k. `reading`: both learn that together, on pictures drawn on demand and used once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.decoder_stages import SceneCode
from scripts.train_embedded.loop import autocast, train, trained
from scripts.train_embedded.pictures import (
    CHUNK_PICTURES,
    FRESH_SEED,
    KINDS,
    MAX_THINGS,
    NOTHING,
    UNKNOWN,
    Chunks,
    save_chunk,
)
from scripts.train_embedded.sizes import VISION, build_encoder
from scripts.train_embedded.world import COLOR_NAMES, POSITIONS, SHAPES, SIZES

# Classes of each kind of label; shape has the extra class "nothing".
NUM_CLASSES = {"shape": len(SHAPES) + 1, "color": len(COLOR_NAMES), "size": len(SIZES), "cell": len(POSITIONS)}
PATCH_BATCH, SLOT_BATCH = 12, 24
NAMED, ODD = 12, 4  # pictures in a batch of `reading`


class PatchHeads(nn.Module):
    """Temporary classifiers on the features of each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(VISION.clip.output_dim, sum(NUM_CLASSES.values()))

    def forward(self, features_BTC: Tensor) -> list[Tensor]:
        return list(self.linear(features_BTC).split(list(NUM_CLASSES.values()), dim=-1))


def run_vision(*, drawn: Path, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 1) -> None:
    """Train the tower on pictures in `drawn`; writes vision.pt into `folder`."""
    torch.manual_seed(seed)
    encoder, heads = build_encoder(), PatchHeads()
    train(
        "vision",
        {"clip": encoder.clip, "heads": heads},
        partial(Chunks(drawn, "crowd", "pixels").batch_at, batch_size=PATCH_BATCH, seed=seed),
        partial(_read_patches, encoder, heads),
        lr=lr,
        num_steps=num_steps,
        seed=seed,
        folder=folder,
    )


def run_slots(*, data: Path, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 3) -> None:
    """Train the visual-query blocks on the features in `data`; writes slots.pt into `folder`."""
    torch.manual_seed(seed)
    encoder = build_encoder()
    load_tower(encoder, folder)
    train(
        "slots",
        {"query": encoder.query},
        partial(_features_at, Chunks(data, "scene", "features"), Chunks(data, "odd", "features"), seed=seed),
        partial(read_scenes, encoder.query, SceneCode()),
        lr=lr,
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate_slots(encoder, data),
    )


def run_reading(*, folder: Path, num_steps: int, lr: float = 5e-4, seed: int = 5) -> None:
    """Train the whole encoder to produce the scene code; writes reading.pt into `folder`."""
    torch.manual_seed(seed)
    encoder = build_encoder()
    load_tower(encoder, folder)
    encoder.query.load_state_dict(trained(folder, "slots", "query"))
    train(
        "reading",
        {"encoder": encoder},
        lambda step: _drawn(["scene"] * NAMED + ["odd"] * ODD, np.random.default_rng([FRESH_SEED, seed, step])),
        partial(read_scenes, encoder, SceneCode()),
        lr=lr,
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate_reading(encoder),
        evaluate_every=600,
    )


def load_tower(encoder: PictureEncoder, folder: Path) -> None:
    """Load the trained tower into `encoder`."""
    encoder.clip.load_state_dict(trained(folder, "vision", "clip"))


@torch.no_grad()
def encode_chunk(encoder: PictureEncoder, folder: Path, kind: str, chunk: int, *, batch_size: int = 20) -> None:
    """Draw `CHUNK_PICTURES` pictures of a kind, and write their features (float16) and labels."""
    path = folder / f"{kind}-{chunk:03d}-features.npy"
    if path.exists():
        return
    rng = np.random.default_rng([KINDS[kind][0], chunk])
    features, labels = [], []
    for _ in range(CHUNK_PICTURES // batch_size):
        pixels, named = _drawn([kind] * batch_size, rng)
        with autocast():
            features.append(encoder.features(pixels).to(torch.float16).numpy())
        labels.append(named.numpy().astype(np.int16))
    save_chunk(path, np.concatenate(features), np.concatenate(labels))


def patch_loss(logits: list[Tensor], labels: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Mean cross entropy of logits (B, 64, classes) against labels (B, 4, 64), and the accuracies."""
    loss = torch.zeros(())
    figures: dict[str, float] = {}
    for index, (name, scores) in enumerate(zip(NUM_CLASSES, logits, strict=True)):
        nothing = len(SHAPES) if name == "shape" else UNKNOWN
        target = torch.where(labels[:, index] == NOTHING, nothing, labels[:, index])
        loss = loss + F.cross_entropy(scores.float().flatten(0, 1), target.flatten(), ignore_index=UNKNOWN)
        known = (target != UNKNOWN) & (labels[:, index] != NOTHING)
        figures[name] = float((scores.argmax(-1) == target)[known].float().mean())
    return loss, {"loss": float(loss.detach()), **figures}


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
def evaluate_slots(encoder: PictureEncoder, data: Path, *, count: int = 1000) -> dict[str, float]:
    """The share of objects (and of whole scenes) that the visual queries describe correctly; also with new pairs."""
    scores: dict[str, float] = {}
    for kind in ("check", "pair"):
        chunks = Chunks(data, kind, "features")
        seen, target = _tensors(chunks.arrays[0][:count].astype(np.float32), chunks.labels[0][:count])
        with autocast():
            visual_query = torch.cat([encoder.query(part) for part in seen.chunk(10)])
        right = readings_right(visual_query, target)
        there = (target[..., 3] != NOTHING)[:, :MAX_THINGS]
        scores[f"{kind} objects"] = float(right[there].float().mean())
        scores[f"{kind} scenes"] = float(right.all(1).float().mean())
    return scores


@torch.no_grad()
def evaluate_reading(encoder: PictureEncoder, *, num_pictures: int = 600) -> dict[str, float]:
    """The share of scenes read correctly, without and with never-drawn pairs, in pictures that training never uses."""
    scores = {}
    for kind in ("check", "pair"):
        rng = np.random.default_rng([KINDS[kind][0], 0])
        right = []
        for _ in range(num_pictures // 20):
            pixels, labels = _drawn([kind] * 20, rng)
            with autocast():
                visual_query = encoder(pixels)
            right.append(readings_right(visual_query, labels).all(1))
        scores[f"{kind} scenes"] = float(torch.cat(right).float().mean())
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


def _read_patches(
    encoder: PictureEncoder, heads: PatchHeads, batch: tuple[NDArray[np.uint8], NDArray[np.int16]]
) -> tuple[Tensor, dict[str, float]]:
    pixels, labels = _tensors(*batch)
    with autocast():
        logits = heads(encoder.features(pixels)[:, 1:])
    return patch_loss(logits, labels)


def _features_at(named: Chunks, odd: Chunks, step: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """A batch of features (B, T, C) and labels (B, 3, 4): three quarters normal pictures, one with unnamed kinds."""
    normal, normal_labels = named.batch_at(step, batch_size=SLOT_BATCH * 3 // 4, seed=seed)
    others, other_labels = odd.batch_at(step, batch_size=SLOT_BATCH // 4, seed=seed + 1)
    return _tensors(np.concatenate([normal, others]).astype(np.float32), np.concatenate([normal_labels, other_labels]))


def _drawn(kinds: Sequence[str], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Pixels and labels of one picture of each kind."""
    pixels, labels = zip(*[KINDS[kind][1](rng) for kind in kinds], strict=True)
    return _tensors(np.stack(pixels), np.stack(labels))


def _tensors(seen: NDArray[np.generic], labels: NDArray[np.int16]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(seen), torch.from_numpy(labels.astype(np.int64))
