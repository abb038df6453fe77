"""`export onnx`: exports a model's picture encoder as ONNX, and compares it with torch."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from llama_adapter.app.models.checkpoints import LoadedEncoder, read_encoder, require_encoder
from llama_adapter.app.models.graph_export.output import (
    check_place,
    give,
    tell,
    told_complaints,
    told_next,
    told_parity,
)
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import EncoderSources
from llama_adapter.app.models.stream_model import stream_model
from llama_adapter.app.pictures.inputs import InputSpec, read_inputs
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.runtime.atomic_write import refuse_to_replace
from llama_adapter.runtime.errors import CheckpointError, GraphError
from llama_adapter.runtime.graphs.card import GraphDtype
from llama_adapter.runtime.graphs.defaults import DTYPE, OPSET, OPSETS
from llama_adapter.runtime.graphs.graph import Graph, read_graph
from llama_adapter.runtime.graphs.lint import lint_graph
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.export import compare, export_onnx
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.squares import squares_of

_MAX_PICTURES = 4  # sample pictures to compare with; enough for two batch sizes, as a float16 encoder is slow on a CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxJob:
    """One run of `export onnx`."""

    sources: EncoderSources
    out: str
    dtype: GraphDtype = DTYPE
    opset: int = OPSET
    pictures: tuple[str, ...] = ()  # pictures to compare with; empty: the sample pictures
    force: bool = False

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise ValueError(f"opset must be one of {', '.join(map(str, OPSETS))}, got {self.opset}")
        if not self.out.endswith(".onnx"):
            raise ValueError(f"out must end in .onnx, got {self.out!r}")


def load_encoder(sources: EncoderSources) -> LoadedEncoder:
    """Load the encoder's weights in float32. The language model is not needed. Raises CheckpointError."""
    if sources.adapter is not None:
        return read_encoder(sources)
    model, _ = stream_model(sources.whole, dtype=torch.float32)  # the decoder is not read
    require_encoder(model)
    if model.precision != FLOAT:
        raise CheckpointError(
            f"The bundle `{sources.model}` has 8-bit weights, and an encoder is exported from full ones",
            hint="export from the bundle it was made from: the exported file works with both",
        )
    return LoadedEncoder(name=model.name, config=model.vision_config, state=model.vision_state)


def run_export_onnx(job: OnnxJob) -> None:
    """Export, compare and lint. The file gets its final name only if its results match the encoder's.

    Raises UsageError if the file exists, and GraphError if the graph's results differ from the encoder's.
    """
    out = Path(job.out).resolve()
    refuse_to_replace([out], force=job.force)
    check_place(out, shown=job.out)
    loaded = load_encoder(job.sources)
    pixels_BHWC = read_pixels(job.pictures, rule=loaded.config.clip.pixels)
    tell(f"exporting `{loaded.name}` as {job.dtype}, opset {job.opset}")
    start = time.perf_counter()

    def check(made: Path) -> None:
        graph = read_graph(made)
        exported = f"exported {graph.num_bytes / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
        _check_parity(graph, made, loaded, pixels_BHWC)
        for line in told_complaints(lint_graph(graph)):
            tell(line)
        tell(exported)

    export_onnx(loaded.config, loaded.state, out, name=loaded.name, dtype=job.dtype, opset=job.opset, check=check)
    give(job.out)
    tell(told_next(job.out, *_model_flags(job.sources)))


def _check_parity(graph: Graph, file: Path, loaded: LoadedEncoder, pixels_BHWC: NDArray[np.uint8]) -> None:
    """Print the differences. Raises GraphError if the graph's results differ from the encoder's."""
    start = time.perf_counter()
    parity = compare(file, encoder_from_state(loaded.config, loaded.state), pixels_BHWC)
    if parity.ok:
        tell(told_parity(parity), start)
        return
    is_half = graph.card is not None and graph.card.dtype == "float16"
    raise GraphError(
        f"The exported graph does not compute what the encoder does; {told_parity(parity)}",
        hint="float16 may be too narrow for these weights: export with --dtype float32"
        if is_half
        else "other versions of onnx or onnxruntime may do better; nothing was written",
    )


def _model_flags(sources: EncoderSources) -> list[str]:
    """The flags that name the encoder's model in other commands, which also need its LLaMA."""
    given = {
        "--model": sources.model,
        "--llama-dir": sources.llama_dir or (None if sources.adapter is None else "LLAMA"),
        "--llama-type": sources.llama_type,
        "--adapter": sources.adapter,
    }
    flags = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    return flags if sources.channel_order == "auto" else [*flags, "--channel-order", sources.channel_order]


def read_pixels(named: Sequence[str], *, rule: PixelRule) -> NDArray[np.uint8]:
    """The pixels of the readable pictures, for the encoder; of a picture that is cut, those of the whole picture.

    Raises GraphError if no picture can be read.
    """
    given = InputSpec(paths=tuple(named)) if named else InputSpec(paths=(str(sample_pictures()),), limit=_MAX_PICTURES)
    pixels = []
    with closing(open_reader("process", ReadingSpec(), pixels=rule)) as reader:
        for one in read_inputs(given):
            assert one.source is not None, "a path names a picture"
            reading = PictureReading(error=one.error) if one.error else reader.read(one.source, name=one.label)
            if reading.pixels is not None:
                pixels.append(squares_of(reading.pixels, side=rule.image_size)[-1])
            elif reading.error is not None:
                tell(f"not compared on this picture: {reading.error.message}")
    if not pixels:
        raise GraphError(
            "None of the pictures can be read, so the graph cannot be compared with the encoder",
            hint="name others as --pictures, or leave it out for the sample pictures",
        )
    return np.stack(pixels)
