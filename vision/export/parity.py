"""Whether an exported graph computes what the encoder computes: both are run on the CPU, on the same pictures."""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from llama_adapter.runtime.errors import GraphError
from llama_adapter.vision.backends.onnx import OnnxVisionBackend
from llama_adapter.vision.encoder import PictureEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The most by which two runs may differ: `max_abs` for queries of magnitude 1, and per picture the least cosine."""

    max_abs: float
    cosine: float


# float32: other orders of summation. float16: 0.003 is measured at full size (docs/export.md) with random weights, and
# trained ones have larger activations on their way.
BOUNDS: Final[Mapping[str, Bound]] = {
    "float32": Bound(max_abs=2e-4, cosine=0.999999),
    "float16": Bound(max_abs=2e-2, cosine=0.9999),
}
_BATCH_SIZES: Final = (1, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Differences between graph and encoder, over all pictures and in batches of one and of several."""

    max_abs: float
    mean_abs: float
    cosine_min: float  # of a picture's whole visual query
    num_pictures: int
    tolerance: float  # for max_abs, at the magnitude of this encoder's queries
    ok: bool


def compare(onnx_path: str | os.PathLike[str], encoder: PictureEncoder, pixels_BHWC: NDArray[np.uint8]) -> Parity:
    """Run the graph in onnxruntime and `encoder` in torch, as it is: give it in float32.

    `pixels_BHWC` (B, S, S, 3) RGB, at least one picture. Raises GraphError without onnxruntime and when the graph
    cannot be loaded or run, ValueError without pictures.
    """
    if not len(pixels_BHWC):
        raise ValueError("wanted at least one picture to compare with")
    with closing(OnnxVisionBackend(onnx_path)) as backend:
        runs = np.stack([_run(backend, pixels_BHWC, batch_size=size) for size in _BATCH_SIZES])
    return judge(runs, encode_reference(encoder, pixels_BHWC), bound=BOUNDS[runs.dtype.name])


def encode_reference(encoder: PictureEncoder, pixels_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The encoder's own visual queries (B, Q, D), picture by picture."""
    with torch.inference_mode():
        return np.concatenate([encoder(torch.from_numpy(one[None])).float().numpy() for one in pixels_BHWC])


def judge(runs_RBQD: NDArray[Any], reference_BQD: NDArray[np.float32], *, bound: Bound) -> Parity:
    """Compare R runs over the same pictures with the reference."""
    runs, reference = runs_RBQD.astype(np.float64), reference_BQD.astype(np.float64)
    if runs.shape[1:] != reference.shape:
        raise GraphError(
            f"The graph makes visual queries of shape {runs.shape[2:]}, and the model of {reference.shape[1:]}",
            hint="it was exported from another model: export it again",
        )
    difference = np.abs(runs - reference)
    cosines = np.sum(runs * reference, axis=(-2, -1)) / (
        np.linalg.norm(runs, axis=(-2, -1)) * np.linalg.norm(reference, axis=(-2, -1)) + np.finfo(np.float64).tiny
    )
    magnitude = max(1.0, float(np.sqrt(np.mean(reference**2))))
    tolerance = bound.max_abs * magnitude
    max_abs, cosine_min = float(difference.max()), float(cosines.min())
    return Parity(
        max_abs=max_abs,
        mean_abs=float(difference.mean()),
        cosine_min=cosine_min,
        num_pictures=len(reference),
        tolerance=tolerance,
        ok=max_abs <= tolerance and cosine_min >= bound.cosine,  # both are false for NaN
    )


def _run(backend: OnnxVisionBackend, pixels_BHWC: NDArray[np.uint8], *, batch_size: int) -> NDArray[Any]:
    """The graph's visual queries (B, Q, D), in its own type."""
    starts = range(0, len(pixels_BHWC), batch_size)
    return np.concatenate([backend.encode(pixels_BHWC[start : start + batch_size]).numpy() for start in starts])
