"""Stage 4: tower and visual-query blocks are trained together, on pictures drawn on demand and used once."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.code_stage import SceneCode
from scripts.train_embedded.features import KINDS
from scripts.train_embedded.loop import Optimizers, autocast, train, trained
from scripts.train_embedded.pictures import FRESH_SEED
from scripts.train_embedded.sizes import build_encoder, is_hidden_matrix
from scripts.train_embedded.slot_stage import read_scenes, readings_right
from scripts.train_embedded.vision_stage import load_tower

NAMED, ODD = 12, 4


def run(*, folder: Path, num_steps: int, lr: float = 5e-4, seed: int = 5) -> None:
    """Train the whole encoder to produce the scene code; writes reading.pt into `folder`."""
    torch.manual_seed(seed)
    encoder = build_encoder()
    load_tower(encoder, folder)
    encoder.query.load_state_dict(trained(folder, "slots", "query"))
    optimizers = Optimizers([(encoder, 1.0)], lr=lr, is_hidden=is_hidden_matrix)
    train(
        "reading",
        {"encoder": encoder},
        optimizers,
        partial(_batch_at, seed=seed),
        partial(read_scenes, encoder, SceneCode()),
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate(encoder),
        evaluate_every=600,
    )


@torch.no_grad()
def evaluate(encoder: PictureEncoder, *, num_pictures: int = 600) -> dict[str, float]:
    """The share of scenes read correctly, without and with never-drawn pairs, in pictures that training never uses."""
    scores = {}
    for kind in ("check", "pair"):
        seed = KINDS[kind][0]
        rng = np.random.default_rng([seed, 0])
        right = []
        for _ in range(num_pictures // 20):
            pixels, labels = _drawn([kind] * 20, rng)
            with autocast():
                visual_query = encoder(pixels)
            right.append(readings_right(visual_query, labels).all(1))
        scores[f"{kind} scenes"] = float(torch.cat(right).float().mean())
    return scores


def _batch_at(step: int, *, seed: int) -> tuple[Tensor, Tensor]:
    return _drawn(["scene"] * NAMED + ["odd"] * ODD, np.random.default_rng([FRESH_SEED, seed, step]))


def _drawn(kinds: Sequence[str], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Pixels and labels of one picture of each kind."""
    pixels, labels = zip(*[KINDS[kind][1](rng) for kind in kinds], strict=True)
    return torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels).astype(np.int64))
