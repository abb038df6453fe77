"""Pictures in the forms that the reference's programs pass: normalised tensors, or inputs of an OM session."""

# B pictures, C x H x W normalised colours, S side of the encoder's square, Q queries, D width of the language model

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.runtime.errors import GraphError, LlamaAdapterError
from llama_adapter.vision.pixels import CLIP_PIXELS, PIXEL_MEAN, PIXEL_STD
from llama_adapter.vision.preprocess import preprocess

_MEAN_C11, _STD_C11 = (
    torch.tensor(values, dtype=torch.float32, device="cpu").view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD)
)


def clip_transform(image: Image.Image) -> Tensor:
    """CLIP's preprocessing: a PIL image -> normalised float32 (3, 224, 224)."""
    if not isinstance(image, Image.Image):
        raise TypeError(f"the transform takes a PIL image, got {type(image).__name__}")
    pixels_CHW = torch.from_numpy(preprocess(image)).permute(2, 0, 1).contiguous()
    return (pixels_CHW.float() / 255 - _MEAN_C11) / _STD_C11


def encoder_pixels(imgs: Any, *, captioner: Captioner) -> Sequence[np.ndarray]:
    """Pictures -> pixels for the captioner's encoder, (S, S, 3) each.

    Parameters:
        imgs: a normalised tensor or array (B, 3, S, S) of any float dtype on any device; a list of these, each
            (3, S, S); or a list of paths, bytes and PIL pictures. Addresses are not fetched here.
        captioner: its encoder normalises pixels, so the normalisation of `imgs` is undone here. Values stay floats: the
            encoder gets the given values up to float32 rounding, even values that no 8-bit picture has.

    Raises ValueError for other shapes, and LlamaAdapterError for a picture that cannot be read.
    """
    is_list = isinstance(imgs, (list, tuple))
    if is_list and not all(isinstance(image, (Tensor, np.ndarray)) for image in imgs):
        return [_read(image, captioner) for image in imgs]
    images_BCHW = torch.stack([torch.as_tensor(image) for image in imgs]) if is_list else torch.as_tensor(imgs)
    side = captioner.image_size
    if images_BCHW.shape[1:] != (3, side, side):
        hint = "; for one picture add .unsqueeze(0)" if images_BCHW.shape == (3, side, side) else ""
        raise ValueError(f"imgs must be normalised (B, 3, {side}, {side}), got {tuple(images_BCHW.shape)}{hint}")
    pixels_BHWC = _unnormalised(images_BCHW)
    # An encoder for "bgr" swaps the channels, and the program already has.
    return list(pixels_BHWC[..., ::-1].copy() if captioner.spec.channel_order == "bgr" else pixels_BHWC)


def _unnormalised(images_BCHW: Tensor) -> np.ndarray:
    """Normalised pictures -> pixels 0..255, (B, H, W, 3)."""
    pixels_BCHW = (images_BCHW.detach().float().cpu() * _STD_C11 + _MEAN_C11) * 255
    return pixels_BCHW.permute(0, 2, 3, 1).contiguous().numpy()


def _read(picture: Any, captioner: Captioner) -> np.ndarray:
    reading = captioner.reader.read(picture)
    if reading.error is not None:
        raise LlamaAdapterError(reading.error.message)
    assert reading.pixels is not None, "a picture without error has pixels"
    return reading.pixels


class SessionEncoder:
    """A `VisionBackend` for the session that a program of the Ascend guide opens and passes with each call.

    The session gets pictures as the program made them. Only if it takes (B, S, S, 3) and gets (B, 3, S, S), as from the
    ModelZoo's own demo, the normalisation is undone: InferSession would read the bytes in the wrong order.
    """

    name = "the program's session"
    pixels = CLIP_PIXELS

    def __init__(self) -> None:
        self.session: Any = None
        self.query_shape = (0, 0)  # (Q, D) that the adapter expects, set when the adapter is loaded

    def encode(self, pixels: np.ndarray) -> Tensor:
        """The visual query (B, Q, D) that the session computes; raises GraphError if it has another shape."""
        takes = self.session.get_inputs()[0].shape if hasattr(self.session, "get_inputs") else pixels.shape
        if pixels.shape[1] == 3 and takes[1] != 3:
            pixels = _unnormalised(torch.from_numpy(pixels)).astype(pixels.dtype)
        query = np.asarray(self.session.infer([pixels])[0])
        wanted = (len(pixels), *self.query_shape)
        if query.shape != wanted:
            raise GraphError(
                f"The session gives {query.shape} for {len(pixels)} pictures, and the adapter reads {wanted}",
                hint="export the encoder of this adapter, for this batch size",
            )
        return torch.from_numpy(query.copy())

    def close(self) -> None:
        """Does nothing: the session belongs to the program."""
