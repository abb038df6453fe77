"""Random changes of training pictures that keep what they show: shift, turn, size and light."""

# B pictures, S pixels a side, C channels, V views, Q visual queries, D their width

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import Encodings

_SHIFT = 0.12  # share of the side
_TURN = math.radians(15)
_SIZE = 0.2  # share
_CONTRAST, _LIGHT = 0.3, 38.0  # a share of the contrast, and levels of 255


def augmented(pixels_BCSS: Tensor, *, random: torch.Generator) -> Tensor:
    """Float pixels in 0..255, changed at random for each picture.

    Pictures are shifted by up to 12 % of their side, turned by up to 15 degrees, made up to a fifth larger or smaller,
    and made lighter, darker, flatter or harder. They are never mirrored, because mirrored texts and signs mean
    something else. Borders are filled by reflection.
    """
    count, device = len(pixels_BCSS), pixels_BCSS.device
    turn_B, size_B, gain_B, light_B, across_B, down_B = (
        (torch.rand(count, generator=random) * 2 - 1) * most
        for most in (_TURN, _SIZE, _CONTRAST, _LIGHT, 2 * _SHIFT, 2 * _SHIFT)
    )
    cos_B, sin_B = turn_B.cos() * (1 + size_B), turn_B.sin() * (1 + size_B)
    rows = torch.stack([cos_B, -sin_B, across_B, sin_B, cos_B, down_B], dim=1).view(count, 2, 3)
    grid = F.affine_grid(rows.to(device), list(pixels_BCSS.shape), align_corners=False)
    moved_BCSS = F.grid_sample(pixels_BCSS, grid, padding_mode="reflection", align_corners=False)
    gain, light = ((1 + gain_B).view(-1, 1, 1, 1).to(device), light_B.view(-1, 1, 1, 1).to(device))
    return ((moved_BCSS - 127.5) * gain + 127.5 + light).clamp(0, 255)


class ChangedPixels(Encodings):
    """Pixels as encodings, (B, S, S, C). In training, every picture is changed at random each time."""

    def of(self, examples: Sequence[TrainExample], *, random: torch.Generator | None = None) -> Tensor | None:
        """uint8 pixels, or with `random` changed float32 pixels in 0..255."""
        pixels_BSSC = super().of(examples)
        seen = torch.tensor([one.has_picture for one in examples])
        if random is None or pixels_BSSC is None or not seen.any():
            return pixels_BSSC
        pixels_BCSS = pixels_BSSC.permute(0, 3, 1, 2).float()
        pixels_BCSS[seen] = augmented(pixels_BCSS[seen], random=random)
        return pixels_BCSS.permute(0, 2, 3, 1)


class Views(Encodings):
    """Visual queries of several views of each picture, the unchanged one first. Training draws a view at random."""

    def __init__(self, views_VQD: Mapping[str, Tensor]) -> None:
        """`views_VQD` maps the digest of a picture to its views."""
        super().__init__(None, None)
        self._views_VQD = views_VQD

    def of(self, examples: Sequence[TrainExample], *, random: torch.Generator | None = None) -> Tensor:
        """Visual queries (B, Q, D)."""
        found = [self._views_VQD[one.example.digest] for one in examples]
        if random is None:
            return torch.stack([views[0] for views in found])
        drawn = torch.rand(len(found), generator=random).tolist()
        return torch.stack([views[int(share * len(views))] for views, share in zip(found, drawn, strict=True)])
