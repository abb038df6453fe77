"""Encoders of the embedded model as torch, ONNX and OM, made once per test run."""

import copy
import fcntl
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.graphs.card import GraphDtype, Port
from llama_adapter.runtime.graphs.open_session import GraphSpec
from llama_adapter.runtime.graphs.sidecar import OmSidecar, write_sidecar
from llama_adapter.vision.backends.exported import ExportedEncoder, open_encoder
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.export import export_onnx
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from tests.bounds import Float64, jittered, rounding_module, spread
from tests.fakes.om_format import write_fake_om

ROOT = Path(__file__).resolve().parents[2]
SOC = "Ascend310P3"


@functools.cache
def embedded_encoder() -> PictureEncoder:
    """The encoder of the embedded model, in float32."""
    model = embedded()
    return encoder_from_state(model.vision_config, model.vision_state)


@functools.cache
def embedded() -> LoadedModel:
    return load_bundle(ROOT / "assets" / "embedded", dtype=torch.float32)


def embedded_onnx(dtype: GraphDtype = "float32") -> Path:
    """The embedded model's encoder. Tests must not change the file."""
    with made_once(f"embedded-{dtype}.onnx") as (path, is_missing):
        if is_missing:
            encoder = embedded_encoder()
            export_onnx(encoder.config, encoder.state_dict(), path, name="embedded", dtype=dtype)
    return path


@contextmanager
def made_once(name: str) -> Iterator[tuple[Path, bool]]:
    """Yields a file that all processes of a test run share, and whether it must be made."""
    path = Path(os.environ["TEST_RUN_FOLDER"]) / name
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path, not path.exists()


def number_made_once(name: str, compute: Callable[[], float]) -> float:
    """A number that takes long to compute, which all processes of a test run share."""
    with made_once(name) as (path, is_missing):
        if is_missing:
            path.write_text(repr(compute()))
        return float(path.read_text())


@functools.cache
def _embedded_card(dtype: GraphDtype) -> EncoderCard:
    card = open_onnx(embedded_onnx(dtype), threads=1).card
    assert card is not None
    return card


@functools.cache
def sample_pixels() -> np.ndarray:
    """All sample pictures as encoder input, uint8 (32, 224, 224, 3)."""
    files = sorted(file for file in (ROOT / "assets" / "pictures").iterdir() if file.suffix in (".png", ".jpg"))
    return np.stack([preprocess(load_picture(file).image) for file in files])


@functools.cache
def sample_queries() -> torch.Tensor:
    """The visual queries that torch computes from `sample_pixels`, float32 (32, Q, D)."""
    queries: torch.Tensor = embedded_encoder()(torch.from_numpy(sample_pixels()))
    return queries


@functools.cache
def query_limit(dtype: GraphDtype = "float32") -> float:
    """How far apart the visual queries of `sample_pixels` by two programs in `dtype` may be."""
    return number_made_once(f"query-limit-{dtype}", functools.partial(_query_limit, dtype))


def _query_limit(dtype: GraphDtype) -> float:
    encoder, pixels = embedded_encoder(), torch.from_numpy(sample_pixels())
    with Float64():
        exact = copy.deepcopy(encoder).double()(pixels)
    if dtype == "float16":
        return spread(rounding_module(encoder, torch.float16)(pixels), exact)
    # One of the pictures is several times as sensitive as the others.
    return spread(sample_queries(), exact, *(jittered(encoder, seed=seed)(pixels) for seed in range(4)))


def without_card(encoder: Path, target: Path, *, is_ours: bool = False, green_std: float | None = None) -> Path:
    """The graph as another program would export it, without card; `is_ours` keeps the names of its nodes."""
    model = onnx.load(encoder)
    del model.metadata_props[:]
    model.graph.name = "main"
    for node in model.graph.node:
        node.name = node.name if is_ours else node.name.rpartition(".")[2]
    if green_std is not None:
        (std,) = [tensor for tensor in model.graph.initializer if tensor.name == "std"]
        values = numpy_helper.to_array(std).copy()
        values[1] = np.float32(green_std)
        std.CopyFrom(numpy_helper.from_array(values, "std"))
    onnx.save(model, target)
    return target


def open_onnx(path: Path, *, threads: int | None = None, own_process: bool = False) -> ExportedEncoder:
    return open_encoder(GraphSpec(kind="onnx", path=str(path), threads=threads, own_process=own_process))


def open_om(path: Path, *, device_id: int = 0, own_process: bool = False) -> ExportedEncoder:
    return open_encoder(GraphSpec(kind="om", path=str(path), device_id=device_id, own_process=own_process))


def make_om(
    path: Path,
    batch_sizes: Sequence[int],
    *,
    dtype: GraphDtype = "float16",
    sidecar: bool = True,
    **changes: Any,
) -> Path:
    """A fake OM of the embedded encoder, with gears if there are several batch sizes.

    `changes` replace `shape` or `dtype` of "input" or "output" in its header, as in an OM from elsewhere.
    """
    onnx, has_gears = embedded_onnx(dtype), len(batch_sizes) > 1
    card = _embedded_card(dtype)
    batch = -1 if has_gears else batch_sizes[0]
    header = {
        "batch_sizes": list(batch_sizes),
        "has_gears": has_gears,
        "soc_version": SOC,
        "input": {"name": "input", "dtype": dtype, "shape": [batch, *card.input_shape], **changes.get("input", {})},
        "output": {"name": "output", "dtype": dtype, "shape": [batch, *card.output_shape], **changes.get("output", {})},
    }
    write_fake_om(path, header=header, onnx=onnx.read_bytes())
    path.chmod(0o640)
    if sidecar:
        write_sidecar(
            path,
            OmSidecar(
                card=card.to_graph(),
                input=Port(dtype=dtype, shape=(batch, *card.input_shape)),
                batch_sizes=tuple(batch_sizes),
                has_gears=has_gears,
                soc_version=SOC,
                precision_mode="mixed_float16",
                sha256=file_digest(path),
                onnx_sha256=file_digest(onnx),
            ).to_json(),
        )
    return path
