"""Converts ONNX to OM with Ascend's ATC: its command line, running it, and the OM with its side-car.

Tested with a stand-in for ATC only. Flags and messages follow the ATC user guide.
"""

import dataclasses
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.explanation import first_that_fits, read_explanations
from llama_adapter.runtime.given import require_one_of
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.defaults import LOG_LEVEL, LOG_LEVELS, PRECISION_MODE
from llama_adapter.runtime.graphs.dims_sidecar import WEIGHTS_FOLDER, DimsSidecar
from llama_adapter.runtime.graphs.gears import MAX_GEARS, Gear, check_gears, with_sums
from llama_adapter.runtime.graphs.graph import Graph
from llama_adapter.runtime.graphs.sidecar import (
    MAX_OM_BYTES,
    OM_MODE,
    OmSidecar,
    check_om_file,
    check_om_path,
    file_mark,
    sidecar_path,
    write_sidecar,
)
from llama_adapter.runtime.partial import named_after, partial_folder

# --precision_mode_v2 and the older --precision_mode exclude each other and share no value.
PRECISION_MODES_V2: Final = ("fp16", "origin", "cube_fp16in_fp32out", "mixed_float16", "mixed_bfloat16")
PRECISION_MODES: Final = (
    "force_fp16",
    "force_fp32",
    "allow_fp32_to_fp16",
    "must_keep_origin_dtype",
    "allow_mix_precision",
    "allow_mix_precision_fp16",
    "allow_mix_precision_bf16",
    "allow_fp32_to_bf16",
)
IMPLMODES: Final = ("high_precision", "high_performance")
_IMPLMODES_FOR_ALL: Final = ("high_precision_for_all", "high_performance_for_all")
# The guide's setting for the Atlas inference chip: faster activations. ATC's default covers fewer operators.
_FAST_ACTIVATIONS: Final = {"op_select_implmode": "high_performance", "optypelist_for_implmode": "Sigmoid,Gelu"}
MAX_GEAR: Final = 2048
_OUTPUT_TYPES: Final = {"float32": "FP32", "float16": "FP16"}
_TICK_S: Final = 30.0
_LAST_LINES: Final = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class AtcSettings:
    """Settings of a conversion. Raises ValueError for settings that ATC refuses."""

    batch_sizes: tuple[int, ...] = (1,)  # 1 to 2048 each; for graphs with one input
    gears: bool = False  # one OM for all batch sizes, 2 to 100 of them, instead of one OM for each
    soc_version: str | None = None  # the chip's full name, such as Ascend310P3; None: not known yet
    precision_mode: str = PRECISION_MODE
    log_level: str = LOG_LEVEL
    op_select_implmode: str | None = None  # None: as in the Ascend guide for chips where it helps, see `plan`
    optypelist_for_implmode: str | None = None  # operators that op_select_implmode is for, with commas; None: all
    device: int | None = None  # of this machine; a conversion does not need one
    extra: tuple[str, ...] = ()  # further flags for ATC

    def __post_init__(self) -> None:
        sizes = set(self.batch_sizes)
        if not sizes or any(not 1 <= size <= MAX_GEAR for size in sizes):
            raise ValueError(f"batch_sizes must be whole numbers of 1 to {MAX_GEAR}, got {list(self.batch_sizes)}")
        if self.gears and not 2 <= len(sizes) <= MAX_GEARS:
            raise ValueError(f"gears need 2 to {MAX_GEARS} different batch_sizes, got {len(sizes)}")
        if self.soc_version is not None and not re.fullmatch(r"Ascend[\w-]+", self.soc_version):
            raise ValueError(f"soc_version must be a chip's full name, such as Ascend310P3, got {self.soc_version!r}")
        require_one_of("precision_mode", self.precision_mode, (*PRECISION_MODES_V2, *PRECISION_MODES))
        require_one_of("op_select_implmode", self.op_select_implmode, (None, *IMPLMODES, *_IMPLMODES_FOR_ALL))
        require_one_of("log_level", self.log_level, LOG_LEVELS)
        if self.optypelist_for_implmode is not None and self.op_select_implmode not in IMPLMODES:
            raise ValueError(f"optypelist_for_implmode needs op_select_implmode {' or '.join(IMPLMODES)}")
        if self.device is not None and not 0 <= self.device <= 255:
            raise ValueError(f"device must be 0 to 255, got {self.device}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AtcRequest:
    """One run of ATC on a graph with one input and output: one OM, for one batch size or for several as gears."""

    graph: Graph
    output: Path  # ends in .om
    batch_sizes: tuple[int, ...]  # of this OM, ascending
    settings: AtcSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class DimsRequest:
    """One run of ATC: one OM for all gears of a graph with several inputs and dynamic dimensions.

    Raises ValueError for gears that ATC, ACL or ais_bench refuse.
    """

    graph: Graph
    output: Path  # ends in .om
    gears: tuple[Gear, ...]
    settings: AtcSettings  # its batch sizes and gears are not used
    external_weights: bool = False  # store weights in files next to the OM, because an OM may not exceed 10 GiB

    def __post_init__(self) -> None:
        check_gears(self.graph.inputs, self.gears)


def plan_dims(graph: Graph, output: Path, settings: AtcSettings, gears: Sequence[Gear]) -> DimsRequest:
    """The request for an ONNX file and its gears. A gear may omit sums of sizes, such as `P_plus_S`.

    Raises GraphError for gears that do not fit the graph.
    """
    try:
        return DimsRequest(
            graph=graph,
            output=output if output.suffix == ".om" else output.with_name(output.name + ".om"),
            gears=tuple(with_sums(gear, graph.inputs) for gear in gears),
            settings=settings,
            external_weights=graph.num_bytes > MAX_OM_BYTES * 0.95,  # the OM also contains code and tables
        )
    except ValueError as error:
        raise GraphError(f"`{graph.path}` cannot be compiled with these gears: {error}") from None


def plan(graph: Graph, output: Path, settings: AtcSettings) -> list[AtcRequest]:
    """The requests for an ONNX file: `<output>.om` with gears, else `<output>_bs1.om`, `<output>_bs2.om`, ...

    For a 310P, activations are compiled for speed, as in the Ascend guide, unless the settings choose otherwise. Raises
    GraphError for a graph with more than one input or output, or with a dynamic dimension other than the batch.
    """
    sizes = tuple(sorted(set(settings.batch_sizes)))
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise GraphError(
            f"The graph has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, and can have one of each",
            hint="export the encoder with `llama-adapter export onnx`",
        )
    port = graph.inputs[0]
    if any(size < 1 for size in port.shape[1:]):
        raise GraphError(
            f"The input `{port.name} {port}` is free in more than its batch, and ATC is given fixed sides",
            hint="export the encoder with fixed sides, as `llama-adapter export onnx` does",
        )
    chooses = settings.op_select_implmode or any(flag.startswith("--op_precision_mode") for flag in settings.extra)
    if (settings.soc_version or "").startswith("Ascend310P") and not chooses:
        settings = dataclasses.replace(settings, **_FAST_ACTIVATIONS)  # type: ignore[arg-type]
    stem = output.with_suffix("") if output.suffix == ".om" else output
    each = [(stem.with_name(f"{stem.name}_bs{size}"), (size,)) for size in sizes]
    return [
        AtcRequest(graph=graph, output=name.with_name(name.name + ".om"), batch_sizes=group, settings=settings)
        for name, group in ([(stem, sizes)] if settings.gears else each)
    ]


def command(request: AtcRequest | DimsRequest, *, folder: Path | None = None) -> list[str]:
    """The command-line arguments of `atc`. With `folder`, ATC runs in it and writes the OM into it."""
    settings, onnx, output = request.settings, request.graph.path, request.output
    if folder is not None:
        onnx, output = Path(os.path.abspath(onnx)), folder / output.name
    flags = [
        "--framework=5",
        f"--model={onnx}",
        f"--output={output.with_suffix('')}",
        "--input_format=ND",
        *(_batch_flags(request) if isinstance(request, AtcRequest) else _dims_flags(request)),
    ]
    precision = "precision_mode_v2" if settings.precision_mode in PRECISION_MODES_V2 else "precision_mode"
    flags += [
        f"--soc_version={settings.soc_version}",
        f"--{precision}={settings.precision_mode}",
        f"--log={settings.log_level}",
    ]
    for name in ("op_select_implmode", "optypelist_for_implmode", "device"):
        if (value := getattr(settings, name)) is not None:
            flags.append(f"--{name}={value}")
    return [*flags, *settings.extra]


def _batch_flags(request: AtcRequest) -> list[str]:
    [port], [output] = request.graph.inputs, request.graph.outputs
    batch = "-1" if request.settings.gears else str(request.batch_sizes[0])
    flags = [f"--input_shape={port.name}:{','.join((batch, *map(str, port.shape[1:])))}"]
    if request.settings.gears:
        flags.append(f"--dynamic_batch_size={','.join(map(str, request.batch_sizes))}")
    if output.dtype in _OUTPUT_TYPES:  # without the flag, the precision mode may change the output's type
        flags.append(f"--output_type={_OUTPUT_TYPES[output.dtype]}")
    return flags


def _dims_flags(request: DimsRequest) -> list[str]:
    """A gear has a number for each -1 of the shapes, in the order of the shapes."""
    shapes = (f"{port.name}:{','.join(map(str, port.shape))}" for port in request.graph.inputs)
    names = [name for port in request.graph.inputs for name in port.symbols]
    gears = (",".join(str(gear[name]) for name in names) for gear in request.gears)
    external = ["--external_weight=1"] if request.external_weights else []
    return [f"--input_shape={';'.join(shapes)}", f"--dynamic_dims={';'.join(gears)}", *external]


def make_om(request: AtcRequest | DimsRequest, *, atc: Path, tick: Callable[[float], None] | None = None) -> Path:
    """Run ATC, and move its OM to its path, with its side-car; returns this path.

    `tick` is called about every 30 s with the seconds since the start. An older OM is replaced at the end, and kept if
    ATC fails. Raises GraphError with the last lines of ATC's output.
    """
    target = Path(os.path.abspath(request.output))
    check_om_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with named_after(target), partial_folder(target) as partial:
        # In a separate folder, because ATC may leave other files.
        _run(atc, command(request, folder=partial), folder=partial, tick=tick)
        made = _find_result(partial, target.stem)
        made.chmod(_mode_in(partial))  # ATC's files are private
        check_om_file(made)
        sidecar = describe(request, made)
        sidecar_path(target).unlink(missing_ok=True)  # an old side-car never exists next to a new OM
        for weights in (partial / WEIGHTS_FOLDER).glob("*"):  # named by their digests
            (target.parent / WEIGHTS_FOLDER).mkdir(exist_ok=True)
            os.replace(weights, target.parent / WEIGHTS_FOLDER / weights.name)
        os.replace(made, target)
        write_sidecar(target, sidecar.to_json())
    return target


def _mode_in(folder: Path) -> int:
    """The mode of a file that is created with OM_MODE in `folder`: the user's umask takes rights away."""
    descriptor = os.open(folder / "mode", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, OM_MODE)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _run(atc: Path, flags: list[str], *, folder: Path, tick: Callable[[float], None] | None) -> None:
    try:
        process = subprocess.Popen(
            [str(atc), *flags],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # because CANN's `atc` is a script that runs the compiler
        )
    except OSError as error:
        raise GraphError(f"`{atc}` cannot be run: {error.strerror}", hint="install CANN's toolkit again") from None
    with process:
        try:
            said = _wait(process, tick=tick)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise explain_failure(said, returncode=process.returncode)


def _wait(process: "subprocess.Popen[str]", *, tick: Callable[[float], None] | None) -> str:
    """Wait for the process; returns its whole output."""
    start = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=_TICK_S)[0]
        except subprocess.TimeoutExpired:
            if tick is not None:
                tick(time.monotonic() - start)


def _find_result(folder: Path, stem: str) -> Path:
    """The OM in `folder`. ATC names models that the host schedules `<output>_<os>_<arch>.om`."""
    found = [folder / f"{stem}.om"] if (folder / f"{stem}.om").is_file() else sorted(folder.glob(f"{stem}_*_*.om"))
    if len(found) != 1:
        there = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise GraphError(
            f"ATC reported success without {stem}.om; its folder contains {there}",
            hint="run the command of --print-command by hand",
        )
    return found[0]


def describe(request: AtcRequest | DimsRequest, made: Path) -> OmSidecar | DimsSidecar:
    """The side-car of the OM `made` by `request`."""
    settings, graph = request.settings, request.graph
    assert settings.soc_version is not None, "an OM is compiled for a chip"
    if isinstance(request, DimsRequest):
        weights = sorted((made.parent / WEIGHTS_FOLDER).glob("*")) if request.external_weights else []
        return DimsSidecar(
            inputs=graph.inputs,
            outputs=graph.outputs,
            gears=request.gears,
            weights={file.name: file.stat().st_size for file in weights},
            sources={file.name: file_mark(file) for file in graph.files},
            soc_version=settings.soc_version,
            precision_mode=settings.precision_mode,
            sha256=file_digest(made),
            onnx_sha256=file_digest(*graph.files),
        )
    batch = -1 if settings.gears else request.batch_sizes[0]
    return OmSidecar(
        card=graph.card,
        input=Port(dtype=_input_dtype(request), shape=(batch, *graph.inputs[0].shape[1:])),
        batch_sizes=request.batch_sizes,
        has_gears=settings.gears,
        soc_version=settings.soc_version,
        precision_mode=settings.precision_mode,
        sha256=file_digest(made),
        onnx_sha256=file_digest(*graph.files),
    )


def _input_dtype(request: AtcRequest) -> str:
    """The type of the graph's input, unless one of the further flags changes it."""
    [port] = request.graph.inputs
    for flag in request.settings.extra:
        name, _, nodes = flag.partition("=")
        if name == "--input_fp16_nodes" and port.name in nodes.split(";"):
            return "float16"
    return port.dtype


def explain_failure(output: str, *, returncode: int) -> GraphError:
    """The error for a failed run. Its details are ATC's last lines."""
    sentence, hint = f"ATC failed with exit code {returncode}", "run it by hand with the line of --print-command"
    if returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        output += "\nKilled"
    if fit := first_that_fits(read_explanations("atc"), output):
        entry, found = fit
        sentence, hint = entry.sentence.format(*found.groups()), entry.hint
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    message = f"{sentence}. Its last lines:" if lines else f"{sentence}, without any output"
    return GraphError(message, hint=hint, details=lines)
