"""Stage 4: tower and visual-query blocks together, on pictures drawn on demand, each used once."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.code_stage import SceneCode
from scripts.train_embedded.features import KINDS
from scripts.train_embedded.loop import Optimizers, train
from scripts.train_embedded.pictures import FRESH_SEED
from scripts.train_embedded.sizes import build_encoder, is_hidden_matrix
from scripts.train_embedded.slot_stage import readings_right, slot_loss
from scripts.train_embedded.vision_stage import load_tower

NAMED, ODD = 12, 4


def run(*, folder: Path, num_steps: int, lr: float = 5e-4, seed: int = 5) -> None:
    """Train the whole encoder to say the scene code; writes reading.pt into `folder`."""
    torch.manual_seed(seed)
    encoder = build_encoder()
    load_tower(encoder, folder)
    encoder.query.load_state_dict(torch.load(folder / "slots.pt", weights_only=True)["modules"]["query"])
    optimizers = Optimizers([(encoder, 1.0)], lr=lr, is_hidden=is_hidden_matrix)
    train(
        "reading",
        {"encoder": encoder},
        optimizers,
        partial(_batch_at, seed=seed),
        partial(_compute, encoder, SceneCode()),
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate(encoder),
        evaluate_every=600,
    )


@torch.no_grad()
def evaluate(encoder: PictureEncoder, *, num_pictures: int = 600) -> dict[str, float]:
    """Share of scenes read rightly, without and with never-drawn pairs, in pictures that training never uses."""
    scores = {}
    for kind in ("check", "pair"):
        seed, draw = KINDS[kind]
        rng = np.random.default_rng([seed, 0])
        right = []
        for _ in range(num_pictures // 20):
            pixels, labels = zip(*[draw(rng) for _ in range(20)], strict=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                visual_query = encoder(torch.from_numpy(np.stack(pixels)))
            right.append(readings_right(visual_query, torch.from_numpy(np.stack(labels).astype(np.int64))).all(1))
        scores[f"{kind} scenes"] = float(torch.cat(right).float().mean())
    return scores


def _batch_at(step: int, *, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([FRESH_SEED, seed, step])
    drawn = [KINDS[kind][1](rng) for kind in ["scene"] * NAMED + ["odd"] * ODD]
    pixels, labels = zip(*drawn, strict=True)
    return torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels).astype(np.int64))


def _compute(encoder: PictureEncoder, code: SceneCode, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float]]:
    pixels, labels = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        visual_query = encoder(pixels)
    loss = slot_loss(code, visual_query, labels)
    return loss, {"loss": float(loss.detach())}
