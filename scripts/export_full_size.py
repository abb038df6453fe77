"""Exports an encoder of the released adapters' size, random weights in it, and measures: docs/export.json and .md.

Usage: python -m scripts.export_full_size
"""

import json
import os
import platform
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

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.graphs.card import EncoderDtype
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.graphs.packages import EXPORT_PACKAGES
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.export.onnx import export_onnx
from llama_adapter.vision.export.parity import compare
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess

DOCS = Path(__file__).resolve().parents[1] / "docs"
CONFIG = VisionConfig(
    clip=ClipConfig(patch_size=14, width=1024, num_layers=24, num_heads=16, output_dim=768),
    query=QueryConfig(num_queries=10, width=768, depth=8, num_heads=16, mlp_dim=3072, output_dim=4096),
    channel_order="bgr",
)
CASES: tuple[tuple[EncoderDtype, int], ...] = (("float32", 18), ("float16", 18), ("float16", 17))
NUM_PICTURES = 3
_PACKAGES = ("torch", "numpy", *EXPORT_PACKAGES)


def main() -> None:
    """Measure all cases and write both files."""
    torch.manual_seed(0)
    state = PictureEncoder(CONFIG).state_dict()
    encoder, pixels_BHWC = encoder_from_state(CONFIG, state), _pixels()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype, opset in CASES:
            rows.append(measure(Path(folder) / "clip.onnx", state, encoder, pixels_BHWC, dtype=dtype, opset=opset))
            print(rows[-1], flush=True)
    content = {"circumstances": circumstances(), "cases": rows}
    (DOCS / "export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (DOCS / "export.md").write_text(as_markdown(content), encoding="utf-8")


def measure(
    path: Path,
    state: Mapping[str, Tensor],
    encoder: PictureEncoder,
    pixels_BHWC: NDArray[np.uint8],
    *,
    dtype: EncoderDtype,
    opset: int,
) -> dict[str, Any]:
    """One export: size, complaints, difference from torch in float32."""
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


def circumstances() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1),
        "parameters_m": round(sum(tensor.numel() for tensor in PictureEncoder(CONFIG).parameters()) / 1e6, 1),
    }


def as_markdown(content: Mapping[str, Any]) -> str:
    """The table, what was measured and where."""
    facts = content["circumstances"]
    lines = [
        "# Exporting an encoder of the released adapters' size",
        "",
        f"ViT-L/14 and the visual-query blocks, {facts['parameters_m']} million random weights, made by",
        "`python -m scripts.export_full_size`. Differences are those of the exported graph, run on the CPU in batches",
        f"of 1 and 3, from torch in float32, over {content['cases'][0]['num_pictures']} sample pictures; complaints",
        "are those of the ATC lint. ATC itself was not run, nor a chip it compiles for.",
        "",
        "| type | opset | file MB | nodes | complaints | max abs | mean abs | least cosine |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['dtype']} | {row['opset']} | {row['file_mb']:,} | {row['num_nodes']} "
        f"| {len(row['complaints'])} | {row['max_abs']:.1e} | {row['mean_abs']:.1e} | {row['cosine_min']:.7f} |"
        for row in content["cases"]
    ]
    operators = ", ".join(f"{name} {count}" for name, count in content["cases"][1]["operators"].items())
    packages = ", ".join(f"{name} {facts[name]}" for name in _PACKAGES)
    lines += [
        "",
        f"Operators (float16): {operators}.",
        "",
        "Times are left out: other programs ran on the machine.",
        "",
        f"On {facts['num_cpus']} CPUs ({facts['cpu']}), {facts['num_threads']} thread; Python",
        f"{facts['python']}, {packages}. Memory at most {facts['peak_memory_gb']} GB.",
    ]
    return "\n".join(lines) + "\n"


def _pixels() -> NDArray[np.uint8]:
    files = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))[:NUM_PICTURES]
    return np.stack([preprocess(load_picture(file).image) for file in files])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
