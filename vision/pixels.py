"""How a picture becomes the square of pixels that a tower takes, and the numbers they become. Imports no torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a process that reads pictures begins without numpy
    import numpy as np

Resample = Literal["bicubic", "bilinear", "lanczos"]

# CLIP's statistics, for pixels in 0..1, in the order R, G, B.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelRule:
    """Resizing, cropping and normalisation, as a tower was trained. The defaults are those of OpenAI's CLIP.

    With `is_squashed`, both sides of a picture are resized to `image_size`. Otherwise the short side is resized to
    `image_size + margin`, and the centre is cropped. With `rgb_first`, a picture is converted to RGB before this, and
    crops are rounded down, as in the image processors of transformers. Otherwise it is converted afterwards, and crops
    are rounded to even numbers, as in torchvision's transforms.

    With `longest`, a picture is cut into squares, see `squares.py`.
    """

    image_size: int = 224
    margin: int = 0
    resample: Resample = "bicubic"
    is_squashed: bool = False
    rgb_first: bool = False
    longest: int = 0  # pixels of the long side of a picture that is cut; 0: pictures are not cut
    mean: tuple[float, ...] = PIXEL_MEAN
    std: tuple[float, ...] = PIXEL_STD

    @property
    def most_side(self) -> int:
        """The largest width or height of the pixels of one picture."""
        return (math.ceil(self.longest / self.image_size) + 1 if self.longest else 1) * self.image_size


CLIP_PIXELS = PixelRule()


def patches_of(pixels_BHWC: Any, *, patch: int) -> Any:
    """Square pictures, a tensor or an array -> patches (B, T, F) row by row, F = rows, columns, colours.

    Pixels beyond the last whole patch are left out.
    """
    num_pictures, side = len(pixels_BHWC), pixels_BHWC.shape[1] // patch
    whole = pixels_BHWC[:, : side * patch, : side * patch].reshape(num_pictures, side, patch, side, patch, 3)
    return whole.swapaxes(2, 3).reshape(num_pictures, side * side, patch * patch * 3)


def folded(
    weight_WCPP: "np.ndarray", bias_W: "np.ndarray | None", *, rule: PixelRule, channel_order: Literal["rgb", "bgr"]
) -> "tuple[np.ndarray, np.ndarray]":
    """A patch embedding, float32, and the normalisation of its pixels as one linear layer of RGB pixels 0..255.

    A patch embedding has no padding, so W ((x / 255 - mean) / std) is a linear function of x with a bias. Returns its
    weight (W, F) for `patches_of`, and its bias (W,).
    """
    import numpy as np

    mean, std = (np.asarray(of, np.float32)[:, None, None] for of in (rule.mean, rule.std))
    scaled_WCPP = weight_WCPP / std
    # With "bgr", the weights of the first channel in training belong to the last channel of RGB pixels.
    scaled_WPPC = (scaled_WCPP[:, ::-1] if channel_order == "bgr" else scaled_WCPP).transpose(0, 2, 3, 1)
    shift_W = -(scaled_WCPP * mean).sum((1, 2, 3))
    shift_W = shift_W if bias_W is None else shift_W + bias_W
    return np.ascontiguousarray(scaled_WPPC / np.float32(255)).reshape(len(weight_WCPP), -1), shift_W


def zero_picture(rule: PixelRule, *, channel_order: Literal["rgb", "bgr"]) -> "np.ndarray":
    """Pixels float32 (S, S, 3) RGB that normalisation turns into zeros.

    The trainers of LLaMA-Adapter V2 use this picture for examples without a picture.
    """
    import numpy as np

    colour = np.asarray(rule.mean if channel_order == "rgb" else rule.mean[::-1]) * 255
    return np.broadcast_to(colour.astype(np.float32), (rule.image_size, rule.image_size, 3))
