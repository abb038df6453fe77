"""Features of drawn pictures on disk. The trained tower runs once per picture, and later stages read its features."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.loop import autocast
from scripts.train_embedded.pictures import (
    CHECK_SEED,
    CHUNK_PICTURES,
    ODD_SEED,
    PAIR_SEED,
    SCENE_SEED,
    Chunks,
    save_chunk,
    scene_to_labels,
    with_unnamed_kinds,
)
from scripts.train_embedded.render import Pixels, draw_scene
from scripts.train_embedded.world import sample_scene

Drawn = tuple[Pixels, NDArray[np.int16]]
_COUNTS = (0.2, 0.35, 0.45)  # one, two, three objects: pictures with more objects teach more


def _draw(
    rng: np.random.Generator,
    *,
    counts: Sequence[float] | None = None,
    never_drawn: str = "without",
    unnamed: bool = False,
) -> Drawn:
    """A picture and its labels. `counts` are the shares of one to three objects."""
    count = None if counts is None else int(rng.choice((1, 2, 3), p=counts))
    scene = sample_scene(rng, num_objects=count, never_drawn=never_drawn)
    things, colors = with_unnamed_kinds(scene, rng) if unnamed else (scene, None)
    return draw_scene(things, rng, colors=colors), scene_to_labels(tuple(things))


# scene: pictures for questions. odd: with shapes and colours that have no name. check and pair: for evaluation, never
# trained on; pair has never-drawn pairs.
KINDS: dict[str, tuple[int, Callable[[np.random.Generator], Drawn]]] = {
    "scene": (SCENE_SEED, partial(_draw, counts=_COUNTS)),
    "odd": (ODD_SEED, partial(_draw, counts=_COUNTS, unnamed=True)),
    "check": (CHECK_SEED, _draw),
    "pair": (PAIR_SEED, partial(_draw, never_drawn="with")),
}


@torch.no_grad()
def encode_chunk(encoder: PictureEncoder, folder: Path, kind: str, chunk: int, *, batch_size: int = 20) -> None:
    """Draw `CHUNK_PICTURES` pictures of a kind, and write their features (float16) and labels."""
    path = folder / f"{kind}-{chunk:03d}-features.npy"
    if path.exists():
        return
    seed, draw = KINDS[kind]
    rng = np.random.default_rng([seed, chunk])
    features, labels = [], []
    for _ in range(CHUNK_PICTURES // batch_size):
        drawn = [draw(rng) for _ in range(batch_size)]
        with autocast():
            seen = encoder.features(torch.from_numpy(np.stack([pixels for pixels, _ in drawn])))
        features.append(seen.to(torch.float16).numpy())
        labels += [label for _, label in drawn]
    save_chunk(path, np.concatenate(features), np.stack(labels))


def feature_batch(chunks: Chunks, step: int, *, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Batch `step` from chunks of features: features (B, T, C) float32, labels (B, 3, 4) int64."""
    features, labels = chunks.batch_at(step, batch_size=batch_size, seed=seed)
    return torch.from_numpy(features.astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
