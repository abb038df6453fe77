"""Whether an exported graph computes what the encoder computes: both are run on the CPU, on the same pictures."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vision.encoder import PictureEncoder
from vision.errors import EncoderError
from vision.export.packages import INSTALL, require


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
_TYPES: Final[Mapping[str, str]] = {"tensor(float)": "float32", "tensor(float16)": "float16"}


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

    `pixels_BHWC` (B, S, S, 3) RGB, at least one picture. Raises EncoderError without onnxruntime and when the graph
    cannot be loaded or run, ValueError without pictures.
    """
    if not len(pixels_BHWC):
        raise ValueError("wanted at least one picture to compare with")
    session, dtype = _open(onnx_path)
    reference = encode_reference(encoder, pixels_BHWC)
    runs = [_run(session, pixels_BHWC.astype(dtype), batch_size=size) for size in _BATCH_SIZES]
    return judge(np.stack(runs), reference, bound=BOUNDS[dtype])


def encode_reference(encoder: PictureEncoder, pixels_BHWC: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The encoder's own visual queries (B, Q, D), picture by picture."""
    with torch.inference_mode():
        return np.concatenate([encoder(torch.from_numpy(one[None])).float().numpy() for one in pixels_BHWC])


def judge(runs_RBQD: NDArray[Any], reference_BQD: NDArray[np.float32], *, bound: Bound) -> Parity:
    """Compare R runs over the same pictures with the reference."""
    runs, reference = runs_RBQD.astype(np.float64), reference_BQD.astype(np.float64)
    if runs.shape[1:] != reference.shape:
        raise EncoderError(
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


def _open(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """A session, and the number type it wants."""
    require("onnxruntime")
    try:
        import onnxruntime
    except Exception as error:  # a wheel built against another numpy, a library that is missing
        raise EncoderError(f"onnxruntime cannot be imported: {error}", hint=INSTALL) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what is wrong comes as an exception
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EncoderError(f"onnxruntime cannot load `{os.fspath(path)}`: {error}") from error
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type not in _TYPES:
        raise EncoderError(
            f"`{os.fspath(path)}` takes {', '.join(f'{port.name} {port.type}' for port in inputs)}, where one input of "
            "float32 or float16 is wanted",
            hint="export it with `llama-adapter export onnx`",
        )
    return session, _TYPES[inputs[0].type]


def _run(session: Any, pixels_BHWC: NDArray[Any], *, batch_size: int) -> NDArray[Any]:
    name = session.get_inputs()[0].name
    try:
        parts = [
            session.run(None, {name: pixels_BHWC[start : start + batch_size]})[0]
            for start in range(0, len(pixels_BHWC), batch_size)
        ]
    except Exception as error:
        raise EncoderError(f"The exported graph cannot be run with batches of {batch_size}: {error}") from error
    return np.concatenate(parts)
