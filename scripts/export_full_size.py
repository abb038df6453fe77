"""Exports a full-size encoder with random weights, and writes docs/export.json and docs/export.md.

Usage: python -m scripts.export_full_size
"""

import resource
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.app.jobs.report import circumstances
from llama_adapter.runtime.graphs.card import GraphDtype
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.packages import EXPORT_PACKAGES
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.export import compare, export_onnx
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.common import sample_files
from scripts.pages.render import save

CONFIG = VisionConfig(
    clip=ClipConfig(patch_size=14, width=1024, num_layers=24, num_heads=16, output_dim=768),
    query=QueryConfig(num_queries=10, width=768, depth=8, num_heads=16, mlp_dim=3072, output_dim=4096),
    channel_order="bgr",
)
CASES: tuple[tuple[GraphDtype, int], ...] = (("float32", 18), ("float16", 18), ("float16", 17))
NUM_PICTURES = 3


def main() -> None:
    torch.manual_seed(0)
    state = PictureEncoder(CONFIG).state_dict()
    encoder = encoder_from_state(CONFIG, state)
    pixels_BHWC = np.stack([preprocess(load_picture(file).image) for file in sample_files(NUM_PICTURES)])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype, opset in CASES:
            rows.append(measure(Path(folder) / "clip.onnx", state, encoder, pixels_BHWC, dtype=dtype, opset=opset))
            print(rows[-1], flush=True)
    about = circumstances(load_before=None)
    about["versions"] |= {name: version(name) for name in ("numpy", *EXPORT_PACKAGES)}
    about["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1)
    about["parameters_m"] = round(sum(tensor.numel() for tensor in encoder.parameters()) / 1e6, 1)
    save("export", {"circumstances": about, "cases": rows})


def measure(
    path: Path,
    state: Mapping[str, Tensor],
    encoder: PictureEncoder,
    pixels_BHWC: NDArray[np.uint8],
    *,
    dtype: GraphDtype,
    opset: int,
) -> dict[str, Any]:
    """Export once; gives the size, the complaints of the checks, and the difference from torch in float32."""
    export_onnx(CONFIG, state, path, name="random ViT-L/14", dtype=dtype, opset=opset)
    graph = read_graph(path)
    parity = compare(path, encoder, pixels_BHWC)
    return {
        "dtype": dtype,
        "opset": opset,
        "file_mb": round(graph.num_bytes / 1e6, 1),
        "num_nodes": len(graph.nodes),
        "operators": dict(graph.operators),
        "complaints": [complaint.sentence for complaint in lint_graph(graph)],
        "max_abs": parity.max_abs,
        "mean_abs": parity.mean_abs,
        "cosine_min": parity.cosine_min,
        "num_pictures": parity.num_pictures,
        "ok": parity.ok,
    }


if __name__ == "__main__":
    main()
