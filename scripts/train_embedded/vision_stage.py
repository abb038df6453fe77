"""Stage 1: for every patch, the CLIP tower learns to classify the object there and the object's cell."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.loop import Optimizers, autocast, train, trained
from scripts.train_embedded.pictures import NOTHING, UNKNOWN, Chunks
from scripts.train_embedded.sizes import VISION, build_encoder, is_hidden_matrix
from scripts.train_embedded.world import COLOR_NAMES, POSITIONS, SHAPES, SIZES

NUM_CLASSES = (len(SHAPES) + 1, len(COLOR_NAMES), len(SIZES), len(POSITIONS))  # shape has the extra class "nothing"
LABEL_NAMES = ("shape", "color", "size", "cell")
BATCH = 12


class PatchHeads(nn.Module):
    """Temporary classifiers on the features of each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(VISION.clip.output_dim, sum(NUM_CLASSES))

    def forward(self, features_BTC: Tensor) -> list[Tensor]:
        return list(self.linear(features_BTC).split(NUM_CLASSES, dim=-1))


def patch_loss(logits: list[Tensor], labels: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Mean cross entropy of logits (B, 64, classes) against labels (B, 4, 64), and the accuracies."""
    loss = torch.zeros(())
    figures: dict[str, float] = {}
    for index, (name, scores) in enumerate(zip(LABEL_NAMES, logits, strict=True)):
        target = labels[:, index]
        nothing = len(SHAPES) if index == 0 else UNKNOWN
        target = torch.where(target == NOTHING, nothing, target)
        flat = scores.float().flatten(0, 1)
        part = F.cross_entropy(flat, target.flatten(), ignore_index=UNKNOWN)
        loss = loss + part
        known = (target != UNKNOWN) & (labels[:, index] != NOTHING)
        hits = (scores.argmax(-1) == target)[known]
        figures[name] = float(hits.float().mean())
    return loss, {"loss": float(loss.detach()), **figures}


def run(*, pictures: Path, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 1) -> None:
    """Train the tower; writes vision.pt into `folder`."""
    torch.manual_seed(seed)
    encoder, heads = build_encoder(), PatchHeads()
    optimizers = Optimizers([(encoder.clip, 1.0), (heads, 1.0)], lr=lr, is_hidden=is_hidden_matrix)
    train(
        "vision",
        {"clip": encoder.clip, "heads": heads},
        optimizers,
        partial(Chunks(pictures, "crowd", "pixels").batch_at, batch_size=BATCH, seed=seed),
        partial(_compute, encoder, heads),
        num_steps=num_steps,
        seed=seed,
        folder=folder,
    )


def load_tower(encoder: PictureEncoder, folder: Path) -> None:
    """Load the trained tower into `encoder`."""
    encoder.clip.load_state_dict(trained(folder, "vision", "clip"))


def _compute(
    encoder: PictureEncoder, heads: PatchHeads, batch: tuple[NDArray[np.uint8], NDArray[np.int16]]
) -> tuple[Tensor, dict[str, float]]:
    pixels, labels = batch
    with autocast():
        features = encoder.features(torch.from_numpy(pixels))
        logits = heads(features[:, 1:])
    return patch_loss(logits, torch.from_numpy(labels.astype(np.int64)))
