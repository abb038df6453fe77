"""Exports the picture encoder as ONNX, for ATC and onnxruntime, and compares the graph with the encoder on the CPU."""

# B pictures, S side in pixels, Q queries, D width of the language model, R runs

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import METADATA_KEY, GraphCard, GraphDtype, fingerprint
from llama_adapter.runtime.graphs.defaults import DTYPE, OPSET, OPSETS
from llama_adapter.runtime.graphs.open_session import GraphSpec
from llama_adapter.runtime.graphs.packages import require
from llama_adapter.runtime.graphs.seal import SEAL_KEY, blank_seal, seal
from llama_adapter.runtime.partial import named_after, partial_folder
from llama_adapter.vision.backends.exported import ExportedEncoder, open_encoder
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.onnx_graph import EncoderGraph

if TYPE_CHECKING:
    import onnx_ir

_BATCH_SIZES: Final = (1, 3)  # for the comparison
DTYPES: Final[Mapping[GraphDtype, torch.dtype]] = {"float32": torch.float32, "float16": torch.float16}
_MAX_PROTOBUF_BYTES = 2_000_000_000  # protobuf's limit is 2 GiB; the rest is for the graph itself


def export_onnx(
    config: VisionConfig,
    state: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    name: str,
    dtype: GraphDtype = DTYPE,
    opset: int = OPSET,
    check: Callable[[Path], None] | None = None,
) -> EncoderCard:
    """Write the encoder with the state dict `state` as ONNX: `input` (B, S, S, 3) -> `output` (B, Q, D), both `dtype`.

    Pixels are RGB in 0..255. Only the batch is dynamic. `name` is the model's name for people. For the file and for
    `check`, see `write_graph`. The file contains the returned card.

    Raises GraphError if a required package is missing and for weights that `dtype` cannot represent, ValueError for an
    unknown dtype or opset, and RuntimeError if `state` does not fit `config`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32 or float16, got {dtype!r}")
    if opset not in OPSETS:
        raise ValueError(f"opset must be 17 or 18, got {opset!r}")
    require("onnx", "onnx-ir")
    card = EncoderCard(name=name, vision=config, dtype=dtype, opset=opset, fingerprint=fingerprint(state))
    encoder = encoder_from_state(config, cast_weights(state, dtype=dtype))
    write_graph(EncoderGraph(encoder, opset=opset).model(), Path(path), card=card.to_graph(), check=check)
    return card


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How much two runs may differ: the largest difference for queries of magnitude 1, and the least cosine."""

    max_abs: float
    cosine: float


# float32: differences come from the order of summation. float16: 0.003 is measured at full size (docs/graphs.md) with
# random weights; trained weights have larger activations.
BOUNDS: Final[Mapping[str, Bound]] = {
    "float32": Bound(max_abs=2e-4, cosine=0.999999),
    "float16": Bound(max_abs=2e-2, cosine=0.9999),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Differences between graph and encoder, over all pictures, in batches of one and of several."""

    max_abs: float
    mean_abs: float
    cosine_min: float  # least cosine of a picture's whole visual query
    num_pictures: int
    tolerance: float  # limit of max_abs, at the magnitude of this encoder's queries
    ok: bool


def compare(onnx_path: str | os.PathLike[str], encoder: PictureEncoder, pixels_BHWC: NDArray[np.uint8]) -> Parity:
    """Run the graph in onnxruntime and `encoder` in torch, and compare their results. `encoder` is float32.

    `pixels_BHWC` is (B, S, S, 3) RGB with B at least 1. Raises GraphError if onnxruntime is missing or the graph cannot
    be loaded or run, and ValueError without pictures.
    """
    if not len(pixels_BHWC):
        raise ValueError("at least one picture is needed to compare with")
    with closing(open_encoder(GraphSpec(kind="onnx", path=os.fspath(onnx_path)))) as exported:
        runs = np.stack([_run(exported, pixels_BHWC, batch_size=size) for size in _BATCH_SIZES])
    with torch.inference_mode():
        reference = np.concatenate([encoder(torch.from_numpy(one[None])).float().numpy() for one in pixels_BHWC])
    return judge(runs, reference, bound=BOUNDS[runs.dtype.name])


def judge(runs_RBQD: NDArray[Any], reference_BQD: NDArray[np.float32], *, bound: Bound) -> Parity:
    """Compare R runs on the same pictures with the reference. Raises GraphError if their shapes differ."""
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


def _run(exported: ExportedEncoder, pixels_BHWC: NDArray[np.uint8], *, batch_size: int) -> NDArray[Any]:
    """The graph's visual queries (B, Q, D), in the type of the graph."""
    starts = range(0, len(pixels_BHWC), batch_size)
    return np.concatenate([exported.encode(pixels_BHWC[start : start + batch_size]) for start in starts])


def cast_weights(state: Mapping[str, Tensor], *, dtype: GraphDtype) -> dict[str, Tensor]:
    """The tensors in `dtype` on the CPU. Raises GraphError for numbers that are not finite in `dtype`."""
    cast = {key: tensor.detach().cpu().to(DTYPES[dtype]) for key, tensor in state.items()}
    for key, tensor in cast.items():
        if not bool(torch.isfinite(tensor).all()):
            if bool(torch.isfinite(state[key]).all()):
                hint = "export in float32: `--dtype float32`, or `--precision float32` of `export decoder`"
                raise GraphError(f"Values of `{key}` are too large for float16", hint=hint)
            raise GraphError(f"Values of `{key}` are not finite", hint="the checkpoint is damaged")
    return cast


def write_graph(
    model: "onnx_ir.Model", path: Path, *, card: GraphCard, check: Callable[[Path], None] | None = None
) -> None:
    """Write an ONNX file, which appears complete or not at all. Its metadata have the card and a digest of its bytes.

    Weights of more than 2 GB are written to `<path>.data`. The names of all nodes begin with the graph's name, because
    compilers drop the metadata but keep names. `check` is called with the complete file before it is moved to `path`.
    If `check` raises, nothing is written.
    """
    import onnx_ir

    for node in model.graph:
        node.name = f"{model.graph.name}.{node.name}"
    target = path.resolve()
    num_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    weights = f"{target.name}.data" if num_bytes > _MAX_PROTOBUF_BYTES else None
    model.metadata_props.update({METADATA_KEY: card.to_json(), SEAL_KEY: blank_seal(weights)})
    target.parent.mkdir(parents=True, exist_ok=True)
    with named_after(target), partial_folder(target) as partial:
        onnx_ir.save(model, partial / target.name, external_data=weights)
        seal(partial / target.name, weights=weights)
        if check is not None:
            check(partial / target.name)
        if weights is not None:
            os.replace(partial / weights, target.parent / weights)
        os.replace(partial / target.name, target)  # the graph comes last, because it makes the export complete
