"""The engines by name, and what the benchmark and its child processes send each other, pickled.

This module imports no vendor package.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_adapter.runtime.schemes import OperatorChoice, Precision
from scripts.peers.sizes import ENCODERS, Part

Section = Literal["machine", "decode", "job", "vision"]  # what one child process measures
Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")
Rung = tuple[Part, int]  # a figure to measure: a part, at a batch size


@dataclass(frozen=True, slots=True)
class Engine:
    """One way of running a model: a program, a number type, and a file."""

    name: str
    section: Section
    program: str  # together with the section a key of `scripts.peers.child.OPENERS`
    dtype: str = "float32"
    precision: Precision = "float"
    file: str = ""  # in the work folder; see `scripts.peers.files`
    note: str = ""
    device: Device = "cpu"
    mode: str = "eager"  # of our decoder
    operators: OperatorChoice = "auto"  # of ours
    tuning: str = ""  # of our products and attention on a GPU, a key of `triton_calls.TUNINGS`; empty for the default
    sizes: tuple[str, ...] = ()  # if not empty, other sizes are not measured
    slots: int | Literal["most"] | None = None  # of large jobs; without it, a row for each picture of a small one

    @property
    def ceiling(self) -> str:
        """For one of our engines, the name of the rate of its matrix products alone."""
        return f"matmul-{self.dtype if self.precision == 'float' else self.precision}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One engine and one size: what to open, and the batch sizes to measure."""

    engine: Engine
    size: str  # of a decoder, an encoder or both in one model; for a job of both, such as `1B+ViT-L/14`
    work: str  # folder of the files that other programs run
    threads: int
    rungs: tuple[Rung, ...]
    num_rows: int = 16  # rows that an engine must hold
    budget_s: float = 2.5
    timeout_s: float = 600.0  # then the child process is ended
    on: str = ""  # a device that stands in for the engine's
    only_files: bool = False  # only make the file that the engine runs
    ceilings: tuple[str, ...] = ()  # for the section `machine`: rates of matrix products to measure, `Engine.ceiling`

    @property
    def device(self) -> str:
        """The device that computes."""
        return self.on or self.engine.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One result of one round: a rate per second, and the seconds spent on measuring it."""

    part: Part
    batch: int
    rate: float
    spent_s: float
    engine: str = ""  # or the name of a ceiling
    stages_s: Mapping[str, float] = field(default_factory=dict)  # for a job
    answers: str = ""  # for a job: a digest of all captions
    slots: int = 0  # for a job: rows that were computed together
    error: float = 0.0  # for an encoder: relative error of its output for a sample picture
    read: float = 0.0  # for steps of one row: memory bandwidth in bytes/s between the steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Figures, or a problem."""

    figures: list[Figure] = field(default_factory=list)
    problem: Literal["", "missing", "failed"] = ""
    reason: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # versions of the engine's packages
    circumstances: dict[str, Any] = field(default_factory=dict)  # for the section `machine`


def _ours(section: Section) -> tuple[Engine, ...]:
    return (
        Engine("ours-float32", section, "ours"),
        Engine("ours-bfloat16", section, "ours", dtype="bfloat16"),
        Engine("ours-int8", section, "ours", precision="int8"),
        Engine("ours-int4", section, "ours", precision="int4"),
    )


_GROWING = "eager, growing cache"
_DYNAMIC = "dynamic quantisation"
_NNCF = "post-training quantisation by NNCF"
_CLIPS = tuple(name for name in ENCODERS if name != "SigLIP-base")  # that `CLIPVisionModel` computes
_ON_CPU: tuple[Engine, ...] = (
    *_ours("decode"),
    Engine("hf-float32", "decode", "hf-dynamic", note=_GROWING),
    Engine("hf-bfloat16", "decode", "hf-dynamic", dtype="bfloat16", note=_GROWING),
    Engine("hf-bfloat16-static", "decode", "hf-static", dtype="bfloat16", note="eager, static cache"),
    Engine("llama.cpp-bf16", "decode", "llama.cpp", dtype="bfloat16", file="bf16.gguf"),
    Engine("llama.cpp-q8_0", "decode", "llama.cpp", precision="int8", file="q8_0.gguf"),
    Engine("llama.cpp-q4_0", "decode", "llama.cpp", precision="int4", file="q4_0.gguf"),
    *_ours("job"),
    Engine("reference-float32", "job", "reference", note="as the reference's loop does"),
    *_ours("vision"),
    Engine("hf-float32", "vision", "hf", note="eager", sizes=_CLIPS),
    Engine("hf-bfloat16", "vision", "hf", dtype="bfloat16", note="eager", sizes=_CLIPS),
    Engine("onnxruntime-float32", "vision", "onnxruntime", file="tokens.onnx"),
    Engine("onnxruntime-int8", "vision", "onnxruntime", precision="int8", file="tokens-int8.onnx", note=_DYNAMIC),
    Engine("openvino-float32", "vision", "openvino", file="tokens.onnx"),
    Engine("openvino-int8", "vision", "openvino", precision="int8", file="tokens-int8.xml", note=_NNCF),
)


def _on_gpu(name: str, section: Section, program: str, **options: Any) -> Engine:
    return Engine(name, section, program, **{"dtype": "bfloat16", **options, "device": "cuda"})


_GRAPH: dict[str, Any] = {"mode": "cuda_graph"}
_COMPILED = "torch.compile, reduce-overhead"
_HALVES = ("bfloat16", "float16")
_SMALL: dict[str, Any] = {  # files of 7B would take minutes
    "sizes": ("tiny", "160M", "1B", "SmolLM2-135M", "SmolLM2-360M", "Qwen2.5-0.5B", "TinyLlama", "Llama-3.2-1B")
}
_JOBS: dict[str, Any] = {"sizes": ("tiny+vit-tiny", "7B+ViT-L/14")}
# Our decoders with kernels that are measured beside the default ones: name -> the one beside, and the tuning.
_NUMBERS: dict[str, dict[str, Any]] = {
    "ours-bfloat16": {},
    "ours-int8": {"precision": "int8"},
    "ours-int4": {"precision": "int4"},
}
_TRIED = {
    **dict.fromkeys(("proposed", "dependent", "proposed-dependent"), tuple(_NUMBERS)),
    "large": ("ours-int8", "ours-int4"),
}
TUNED = {f"{beside}-{tuning}": (beside, tuning) for tuning, names in _TRIED.items() for beside in names}
# Our engines of large jobs, the most important ones first.
LARGE_JOBS: dict[str, dict[str, Any]] = {
    "ours-bfloat16-256-slots": {"slots": 256},
    "ours-bfloat16-most-slots": {"slots": "most", "note": "as many as fit"},
    "ours-w8a8-256-slots": {"slots": 256, "precision": "int8", "operators": "w8a8", "note": "inputs rounded too"},
    "ours-int8-large-256-slots": {"slots": 256, "precision": "int8", "tuning": "large", "note": "kernels to be tried"},
    "ours-bfloat16-64-slots": {"slots": 64},
    "ours-int8-256-slots": {"slots": 256, "precision": "int8"},
}
_ON_GPU: tuple[Engine, ...] = (  # the most important ones first
    _on_gpu("ours-bfloat16", "decode", "ours", **_GRAPH),
    _on_gpu("hf-bfloat16", "decode", "hf-dynamic", note=_GROWING),
    _on_gpu("ours-int4", "decode", "ours", precision="int4", **_GRAPH),
    _on_gpu("ours-int8", "decode", "ours", precision="int8", **_GRAPH),
    _on_gpu("hf-bfloat16-compiled", "decode", "hf-compiled", note=f"static cache, {_COMPILED}"),
    _on_gpu("ours-bfloat16-eager", "decode", "ours", note="without graphs"),
    _on_gpu("ours-float16", "decode", "ours", dtype="float16", **_GRAPH),
    *(
        _on_gpu(name, "decode", "ours", tuning=tuning, **_NUMBERS[beside], **_GRAPH)
        for name, (beside, tuning) in TUNED.items()
    ),
    _on_gpu("vllm-bfloat16", "decode", "vllm", file="config.json", note="CUDA graphs"),
    _on_gpu("llama.cpp-q4_0", "decode", "llama.cpp", precision="int4", file="q4_0.gguf", **_SMALL),
    _on_gpu("llama.cpp-bf16", "decode", "llama.cpp", file="bf16.gguf", **_SMALL),
    _on_gpu("llama.cpp-q8_0", "decode", "llama.cpp", precision="int8", file="q8_0.gguf", **_SMALL),
    _on_gpu("ours-float32", "vision", "ours", dtype="float32", **_GRAPH),  # first, as the errors are relative to it
    *(_on_gpu(f"ours-{dtype}", "vision", "ours", dtype=dtype, **_GRAPH) for dtype in _HALVES),
    *(_on_gpu(f"hf-{dtype}", "vision", "hf", dtype=dtype, note="eager") for dtype in (*_HALVES, "float32")),
    *(_on_gpu(f"hf-{dtype}-compiled", "vision", "hf-compiled", dtype=dtype, note=_COMPILED) for dtype in _HALVES),
    _on_gpu("ours-bfloat16-aten", "vision", "ours", operators="aten", note="quick GELU as three kernels", **_GRAPH),
    _on_gpu("ours-bfloat16", "job", "ours", **_GRAPH, **_JOBS),
    *(_on_gpu(name, "job", "ours", **options, **_GRAPH, **_JOBS) for name, options in LARGE_JOBS.items()),
    *(_on_gpu(f"reference-{dtype}", "job", "reference", dtype=dtype, **_JOBS) for dtype in ("float16", "bfloat16")),
)
ENGINES = (*_ON_CPU, *_ON_GPU)
MACHINES = {device: Engine("machine", "machine", "machine", device=device) for device in DEVICES}


def engine_names() -> list[str]:
    """All names without duplicates; a name may be in several sections and on several devices."""
    return list(dict.fromkeys(engine.name for engine in ENGINES))


def chosen_engines(names: Collection[str], section: Section, device: Device = "cpu") -> list[Engine]:
    """The named engines of a section on a device."""
    return [one for one in ENGINES if (one.section, one.device) == (section, device) and one.name in names]


def tuned(name: str) -> tuple[str, ...]:
    """An engine, and the same one with each of the kernels that are to be tried."""
    return name, *(one for one, (beside, _) in TUNED.items() if beside == name)
