"""Trains a small convolutional network from scratch for some seconds, and prints its held-out accuracy.

Usage: python -m scripts.small_network FOLDER [--seconds 60] [--threads 2]

FOLDER has the folders learn/CLASS and held/CLASS. It says what a few lines of torch reach with pictures for `train`.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.common import parser_of

SIDE, WIDTHS, BATCH = 64, (32, 64, 96, 128), 32
HIGHEST_RATE, WARM_UP = 4e-3, 0.3  # of AdamW; the share of the time in which the rate rises
TURN, SCALE, SHIFT, LIGHT = 0.26, 0.15, 0.24, 0.3  # at most: radians, relative, of half a side, of half the range


def network(num_classes: int) -> nn.Sequential:
    layers, width = list[nn.Module](), 3
    for wider in WIDTHS:
        layers += [nn.Conv2d(width, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, num_classes))


def augment(pixels_BCHW: Tensor) -> Tensor:
    """Each picture in a random position and light."""
    turn_B, scale_B, x_B, y_B, contrast_B, light_B = 2 * torch.rand(6, len(pixels_BCHW)) - 1
    along_B, across_B = ((1 + SCALE * scale_B) * turned for turned in ((TURN * turn_B).cos(), (TURN * turn_B).sin()))
    rows = torch.stack((along_B, -across_B, SHIFT * x_B)), torch.stack((across_B, along_B, SHIFT * y_B))
    grid = F.affine_grid(torch.stack(rows).permute(2, 0, 1), list(pixels_BCHW.shape), align_corners=False)
    moved_BCHW = F.grid_sample(pixels_BCHW, grid, padding_mode="reflection", align_corners=False)
    seen_BCHW: Tensor = (
        moved_BCHW * (1 + LIGHT * contrast_B[:, None, None, None]) + LIGHT * light_B[:, None, None, None]
    )
    return seen_BCHW


def accuracy_after(seconds: float, learn: Path, held: Path) -> float:
    """The share of `held` that is right after training on `learn`. The rate rises and falls once, by the clock."""
    torch.manual_seed(0)
    classes = sorted(path.name for path in learn.iterdir())
    (pixels_NCHW, labels_N), (held_NCHW, held_N) = (_read(folder, classes) for folder in (learn, held))
    model = network(len(classes))
    optimizer, order, start = torch.optim.AdamW(model.parameters()), list[Tensor](), time.perf_counter()
    while (progress := (time.perf_counter() - start) / seconds) < 1:
        order = order or list(torch.split(torch.randperm(len(labels_N)), BATCH))
        chosen_B = order.pop()
        rise = min(progress / WARM_UP, (1 - progress) / (1 - WARM_UP))
        optimizer.param_groups[0]["lr"] = HIGHEST_RATE * (1 - math.cos(math.pi * rise)) / 2
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(augment(pixels_NCHW[chosen_B])), labels_N[chosen_B]))
        optimizer.step()
    with torch.no_grad():
        return float((model.eval()(held_NCHW).argmax(1) == held_N).float().mean())


def _read(folder: Path, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The pictures of FOLDER/CLASS/NAME, (N, C, H, W) from -1 to 1, and the numbers of their classes."""
    paths = sorted(folder.glob("*/*"))
    small = []
    for path in paths:
        with Image.open(path) as image:
            small.append(np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32))
    labels_N = torch.tensor([classes.index(path.parent.name) for path in paths])
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2) / 127.5 - 1, labels_N


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"{accuracy_after(given.seconds, given.folder / 'learn', given.folder / 'held'):.1%} right")
