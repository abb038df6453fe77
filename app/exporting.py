"""The commands that export the encoder: weights -> ONNX, ONNX -> OM. Paths on stdout, talk on stderr."""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from app.bundle import VISION, check_sizes, expected_shapes, read_configs, read_manifest, read_state
from app.checkpoints import adapter_name, find_clip, resolve_channel_order
from app.errors import UsageError
from app.inputs import expand_inputs
from app.resources import embedded_model, sample_pictures
from llm.runtime.backend import DTYPES
from llm.weights.adapter import AdapterFile, open_adapter
from vision.card import EncoderDtype
from vision.config import VisionConfig
from vision.encoder import encoder_from_state
from vision.errors import EncoderError
from vision.export.atc import AtcRequest, command, make_om, plan
from vision.export.defaults import BATCH_SIZES, DTYPE, LOG_LEVEL, OPSET, OPSETS, PRECISION_MODE
from vision.export.graph import Graph, read_graph
from vision.export.lint import Complaint, lint_graph
from vision.export.onnx import export_onnx
from vision.export.parity import Parity, compare
from vision.export.toolkit import detect_soc_version, find_atc
from vision.image import load_picture
from vision.preprocess import preprocess
from vision.weights import build_vision

CLIP_FILE = "ViT-L-14.pt"  # as OpenAI publishes it, and where its own package keeps it
CLIP_CACHE = Path("~/.cache/clip")
_MAX_PICTURES = 4  # of the samples; enough for two batch sizes, and a float16 encoder is slow on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSources:
    """Where an encoder's weights are: an adapter with its CLIP, else a bundle, else the embedded model."""

    model: str | None = None
    adapter: str | None = None
    clip: str | None = None
    visual_heads: int | None = None
    channel_order: Literal["auto", "rgb", "bgr"] = "auto"

    def __post_init__(self) -> None:
        if self.model is not None and self.adapter is not None:
            raise ValueError("model and adapter exclude each other: give a bundle, or the files it is made of")
        if self.adapter is None and (self.clip is not None or self.visual_heads is not None):
            raise ValueError("clip and visual_heads go with adapter, which is missing")
        for name in ("model", "adapter", "clip"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty: name a path, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedEncoder:
    """An encoder's configuration and state dict, and the model's name for people."""

    name: str
    config: VisionConfig
    state: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxJob:
    """One `export onnx`."""

    sources: EncoderSources
    out: str
    dtype: EncoderDtype = DTYPE
    opset: int = OPSET
    pictures: tuple[str, ...] = ()  # to compare with; none means the sample pictures
    force: bool = False

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise ValueError(f"opset must be one of {', '.join(map(str, OPSETS))}, got {self.opset}")
        if not self.out.endswith(".onnx"):
            raise ValueError(f"out must end in .onnx, got {self.out!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OmJob:
    """One `export om`; without `soc_version` the chip of this machine is asked for."""

    onnx: str
    out: str | None = None  # None: beside the ONNX file, under its name
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    gears: bool = False
    soc_version: str | None = None
    precision_mode: str = PRECISION_MODE
    log_level: str = LOG_LEVEL
    atc_flags: tuple[str, ...] = ()
    print_command: bool = False
    force: bool = False


def load_encoder(sources: EncoderSources) -> LoadedEncoder:
    """The encoder's weights in float32; the language model is not read, nor need it be there.

    Raises CheckpointError, VisionCheckpointError.
    """
    return _from_bundle(sources) if sources.adapter is None else _from_adapter(sources, sources.adapter)


def _from_bundle(sources: EncoderSources) -> LoadedEncoder:
    place = embedded_model() if sources.model is None else Path(sources.model)
    manifest = read_manifest(place)
    check_sizes(place, manifest)
    config, _ = read_configs(place, manifest)
    state = read_state(place / VISION, wanted=expected_shapes(config), stored=DTYPES[manifest["dtype"]])
    if sources.channel_order != "auto":
        config = VisionConfig(clip=config.clip, query=config.query, channel_order=sources.channel_order)
    state = {key: tensor.float() for key, tensor in state.items()}
    return LoadedEncoder(name=str(manifest["name"]), config=config, state=state)


def _from_adapter(sources: EncoderSources, file: str) -> LoadedEncoder:
    adapter = open_adapter(file)
    channel_order, _ = resolve_channel_order(sources.channel_order, adapter)
    config, state = build_vision(
        adapter.visual,
        name=adapter.name,
        clip=find_clip(_find_clip_file(sources.clip, adapter), adapter),
        visual_heads=sources.visual_heads,
        channel_order=channel_order,
    )
    return LoadedEncoder(name=adapter_name(file), config=config, state=state)


def _find_clip_file(named: str | None, adapter: AdapterFile) -> str | Path | None:
    """The file that was named, else OpenAI's where it usually lies; None for an adapter that holds its own."""
    if named is not None or adapter.clip:
        return named
    places = (Path(adapter.name).parent, Path(), CLIP_CACHE.expanduser())
    return next((place / CLIP_FILE for place in places if (place / CLIP_FILE).is_file()), None)


def run_export_onnx(job: OnnxJob) -> None:
    """Export, lint, compare; the file is put in place when it computes what the encoder does.

    Raises UsageError when there is a file already, EncoderError when the graph differs from the encoder.
    """
    out = Path(job.out).resolve()
    _refuse_to_replace([out], force=job.force)
    loaded = load_encoder(job.sources)
    pixels_BHWC = _pixels(job.pictures, size=loaded.config.clip.image_size)
    start = time.perf_counter()

    def check(made: Path) -> None:
        graph = read_graph(made)
        _tell(f"exported `{loaded.name}` as {job.dtype}, opset {job.opset}: {graph.num_bytes / 1e6:,.1f} MB", start)
        _check_graph(graph, made, loaded, pixels_BHWC)

    export_onnx(loaded.config, loaded.state, out, name=loaded.name, dtype=job.dtype, opset=job.opset, check=check)
    print(job.out)


def _check_graph(graph: Graph, file: Path, loaded: LoadedEncoder, pixels_BHWC: NDArray[np.uint8]) -> None:
    """Tell what is in the graph; raise EncoderError when it computes something else than the encoder."""
    _tell(f"operators: {', '.join(f'{name} {count}' for name, count in graph.operators.items())}")
    for line in told_complaints(lint_graph(graph)):
        _tell(line)
    start = time.perf_counter()
    parity = compare(file, encoder_from_state(loaded.config, loaded.state), pixels_BHWC)
    _tell(told_parity(parity), start)
    if not parity.ok:
        is_half = graph.card is not None and graph.card.dtype == "float16"
        raise EncoderError(
            f"The exported graph does not compute what the encoder does: {told_parity(parity)}",
            hint="float16 may be too narrow for these weights: export with --dtype float32"
            if is_half
            else "other versions of torch, onnx or onnxscript may do better; nothing was written",
        )


def run_export_om(job: OmJob) -> None:
    """Lint and convert, or print the command lines; raises EncoderError when the lint or ATC refuses the file."""
    graph = read_graph(job.onnx)
    requests = plan_om(job, graph)
    complaints = lint_graph(graph)
    for line in told_complaints(complaints):
        _tell(line)
    if job.print_command:
        for request in requests:
            print(shlex.join(["atc", *command(request)]))
        return
    errors = [complaint for complaint in complaints if complaint.level == "error"]
    if errors and not job.force:
        raise EncoderError(
            f"ATC will refuse `{job.onnx}`: {errors[0].sentence}",
            hint=f"{errors[0].hint}; or try all the same with --force",
        )
    _refuse_to_replace([request.output for request in requests], force=job.force)
    atc = find_atc()
    if graph.card is None:
        _tell(f"`{job.onnx}` was not exported here: whether its weights are those of a model cannot be checked later")
    for request in requests:
        start = time.perf_counter()
        sizes = ", ".join(map(str, request.batch_sizes))
        _tell(f"ATC compiles for {request.soc_version}, batch {sizes}; this takes minutes")
        made = make_om(request, atc=atc, graph=graph)
        _tell(f"wrote {made.stat().st_size / 1e6:,.1f} MB", start)
        print(request.output, flush=True)


def plan_om(job: OmJob, graph: Graph) -> list[AtcRequest]:
    """What is to be converted; raises ValueError for flags that ATC refuses, EncoderError without a known chip."""
    return plan(
        graph,
        Path(job.onnx),
        Path(job.onnx).with_suffix("") if job.out is None else Path(job.out),
        batch_sizes=job.batch_sizes,
        gears=job.gears,
        soc_version=detect_soc_version() if job.soc_version is None else job.soc_version,
        precision_mode=job.precision_mode,
        log_level=job.log_level,
        extra=job.atc_flags,
    )


def told_complaints(complaints: Sequence[Complaint]) -> Iterator[str]:
    """Lines for people."""
    if not complaints:
        yield "lint: no complaints; names and opsets of the operators are those that ATC knows"
    for complaint in complaints:
        yield f"lint {complaint.level}: {complaint.sentence} ({complaint.count} x); hint: {complaint.hint}"


def told_parity(parity: Parity) -> str:
    """A line for people."""
    return (
        f"largest difference {parity.max_abs:.1e} (mean {parity.mean_abs:.1e}, tolerance {parity.tolerance:.1e}), "
        f"least cosine {parity.cosine_min:.7f}, over {parity.num_pictures} pictures"
    )


def _pixels(named: Sequence[str], *, size: int) -> NDArray[np.uint8]:
    """Pictures as the encoder gets them; raises PictureError for one that cannot be read."""
    found = expand_inputs(named) if named else islice(expand_inputs([sample_pictures()]), _MAX_PICTURES)
    return np.stack([preprocess(load_picture(one.source_path).image, size=size) for one in found])


def _refuse_to_replace(paths: Sequence[Path], *, force: bool) -> None:
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise UsageError(f"`{there[0]}` exists already", hint="replace it with --force, or name another one as --out")


def _tell(line: str, since: float | None = None) -> None:
    """A line on stderr, with the seconds since then."""
    print(line if since is None else f"{line} ({time.perf_counter() - since:.1f} s)", file=sys.stderr, flush=True)
