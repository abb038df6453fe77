"""How CLIP normalises pixels. Imports no torch."""

import numpy as np

from llama_adapter.vision.config import ChannelOrder

# CLIP's statistics, for pixels in 0..1, in the order R, G, B.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)


def zero_picture(size: int, *, channel_order: ChannelOrder) -> np.ndarray:
    """Pixels float32 (size, size, 3) RGB that normalisation turns into zeros.

    The trainers of LLaMA-Adapter V2 use this picture for examples without a picture.
    """
    colour = np.asarray(PIXEL_MEAN if channel_order == "rgb" else PIXEL_MEAN[::-1]) * 255
    return np.broadcast_to(colour.astype(np.float32), (size, size, 3))
