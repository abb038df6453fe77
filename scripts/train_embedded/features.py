"""Features of drawn pictures on disk: the trained tower runs once per picture, later stages read them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.loop import shuffled_at
from scripts.train_embedded.pictures import (
    CHECK_SEED,
    CHUNK_PICTURES,
    ODD_SEED,
    PAIR_SEED,
    SCENE_SEED,
    scene_to_labels,
    with_unnamed_kinds,
)
from scripts.train_embedded.render import Pixels, draw_scene
from scripts.train_embedded.world import sample_scene

Drawn = tuple[Pixels, NDArray[np.int16]]
_COUNTS = (0.2, 0.35, 0.45)  # one, two, three objects: there is more to learn in the fuller ones


def _draw_scene(rng: np.random.Generator) -> Drawn:
    scene = sample_scene(rng, num_objects=int(rng.choice((1, 2, 3), p=_COUNTS)))
    return draw_scene(scene, rng), scene_to_labels(scene)


def _draw_odd(rng: np.random.Generator) -> Drawn:
    scene = sample_scene(rng, num_objects=int(rng.choice((1, 2, 3), p=_COUNTS)))
    things, colors = with_unnamed_kinds(scene, rng)
    return draw_scene(things, rng, colors=colors), scene_to_labels(tuple(things))


def _draw_check(rng: np.random.Generator) -> Drawn:
    scene = sample_scene(rng)
    return draw_scene(scene, rng), scene_to_labels(scene)


def _draw_pair(rng: np.random.Generator) -> Drawn:
    scene = sample_scene(rng, never_drawn="with")
    return draw_scene(scene, rng), scene_to_labels(scene)


# scene: to be asked about; odd: with shapes and colours that have no name; check and pair: only looked at, never
# trained on, pair with never-drawn pairs.
KINDS: dict[str, tuple[int, Callable[[np.random.Generator], Drawn]]] = {
    "scene": (SCENE_SEED, _draw_scene),
    "odd": (ODD_SEED, _draw_odd),
    "check": (CHECK_SEED, _draw_check),
    "pair": (PAIR_SEED, _draw_pair),
}


@torch.no_grad()
def encode_chunk(encoder: PictureEncoder, folder: Path, kind: str, chunk: int, *, batch_size: int = 20) -> None:
    """Draw `CHUNK_PICTURES` pictures of a kind; write their features (float16) and labels."""
    path = folder / f"{kind}-{chunk:03d}-features.npy"
    if path.exists():
        return
    seed, draw = KINDS[kind]
    rng = np.random.default_rng([seed, chunk])
    features, labels = [], []
    for _ in range(CHUNK_PICTURES // batch_size):
        drawn = [draw(rng) for _ in range(batch_size)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = encoder.features(torch.from_numpy(np.stack([pixels for pixels, _ in drawn])))
        features.append(seen.to(torch.float16).numpy())
        labels += [label for _, label in drawn]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{kind}-{chunk:03d}-labels.npy", np.stack(labels))
    unfinished = folder / f"unfinished-{kind}-{chunk:03d}.npy"
    np.save(unfinished, np.concatenate(features))
    unfinished.rename(path)


def load(folder: Path, kind: str) -> tuple[list[NDArray[np.float16]], list[NDArray[np.int16]]]:
    """All finished chunks of a kind: features (2000, 65, C) and labels (2000, 3, 4)."""
    paths = sorted(folder.glob(f"{kind}-*-features.npy"))
    if not paths:
        raise FileNotFoundError(f"no features of kind {kind} in {folder}; run the stage `features` first")
    return (
        [np.load(path, mmap_mode="r") for path in paths],
        [np.load(path.with_name(path.name.replace("features", "labels"))) for path in paths],
    )


class Features:
    """What the tower saw of all pictures of a kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Raises FileNotFoundError if there are none of that kind."""
        self._features, self._labels = load(folder, kind)

    def batch_at(self, step: int, *, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Batch `step` of an endless walk through them: features (B, T, C) float32, labels (B, 3, 4) int64."""
        drawn = shuffled_at(step, count=len(self._features) * CHUNK_PICTURES, batch_size=batch_size, seed=seed)
        places = [divmod(int(place), CHUNK_PICTURES) for place in drawn]
        return (
            torch.from_numpy(np.stack([self._features[chunk][row] for chunk, row in places]).astype(np.float32)),
            torch.from_numpy(np.stack([self._labels[chunk][row] for chunk, row in places]).astype(np.int64)),
        )
