"""The engines by name. This module imports no vendor package."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from llama_adapter.runtime.schemes import Precision

Section = Literal["machine", "decode", "job", "vision"]  # what one child process measures
Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
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
    sizes: tuple[str, ...] = ()  # if not empty, other sizes are not measured
    slots: int | Literal["most"] | None = None  # of large jobs; without it, a row for each picture of a small one


def _engine(name: str, section: Section, program: str, **options: Any) -> Engine:
    return Engine(name=name, section=section, program=program, **options)


def _ours(section: Section) -> tuple[Engine, ...]:
    return (
        _engine("ours-float32", section, "ours"),
        _engine("ours-bfloat16", section, "ours", dtype="bfloat16"),
        _engine("ours-int8", section, "ours", precision="int8"),
        _engine("ours-int4", section, "ours", precision="int4"),
    )


_GROWING = "eager, growing cache"
_GRAPHS = "exported decoder in onnxruntime"
_DYNAMIC = "dynamic quantisation"
_NNCF = "post-training quantisation by NNCF"
_ON_CPU: tuple[Engine, ...] = (
    *_ours("decode"),
    *(
        _engine(f"graphs-{precision}", "decode", "graphs", precision=kind, file=f"graphs-{precision}", note=_GRAPHS)
        for precision, kind in (("float32", "float"), ("int8", "int8"), ("int4", "int4"))
    ),
    _engine("mindspore-float32", "decode", "graphs", file="mindir", note="exported decoder in MindSpore"),
    _engine("hf-float32", "decode", "hf-dynamic", note=_GROWING),
    _engine("hf-bfloat16", "decode", "hf-dynamic", dtype="bfloat16", note=_GROWING),
    _engine("hf-bfloat16-static", "decode", "hf-static", dtype="bfloat16", note="eager, static cache"),
    _engine("llama.cpp-bf16", "decode", "llama.cpp", dtype="bfloat16", file="bf16.gguf"),
    _engine("llama.cpp-q8_0", "decode", "llama.cpp", precision="int8", file="q8_0.gguf"),
    _engine("llama.cpp-q4_0", "decode", "llama.cpp", precision="int4", file="q4_0.gguf"),
    *_ours("job"),
    _engine("reference-float32", "job", "reference", note="as the reference's loop does"),
    *_ours("vision"),
    _engine("hf-float32", "vision", "hf", note="eager"),
    _engine("hf-bfloat16", "vision", "hf", dtype="bfloat16", note="eager"),
    _engine("onnxruntime-float32", "vision", "onnxruntime", file="tokens.onnx"),
    _engine("onnxruntime-int8", "vision", "onnxruntime", precision="int8", file="tokens-int8.onnx", note=_DYNAMIC),
    _engine("openvino-float32", "vision", "openvino", file="tokens.onnx"),
    _engine("openvino-int8", "vision", "openvino", precision="int8", file="tokens-int8.xml", note=_NNCF),
)


def _on_gpu(name: str, section: Section, program: str, **options: Any) -> Engine:
    return Engine(name=name, section=section, program=program, **{"dtype": "bfloat16", **options, "device": "cuda"})


_GRAPH: dict[str, Any] = {"mode": "cuda_graph"}
_COMPILED = "torch.compile, reduce-overhead"
_HALVES = ("bfloat16", "float16")
_SMALL: dict[str, Any] = {"sizes": ("tiny", "160M", "1B")}  # files of 7B would take minutes
_JOBS: dict[str, Any] = {"sizes": ("tiny+vit-tiny", "7B+ViT-L/14")}
_ON_GPU: tuple[Engine, ...] = (  # the most important ones first
    _on_gpu("ours-bfloat16", "decode", "ours", **_GRAPH),
    _on_gpu("hf-bfloat16", "decode", "hf-dynamic", note=_GROWING),
    _on_gpu("ours-int4", "decode", "ours", precision="int4", **_GRAPH),
    _on_gpu("ours-int8", "decode", "ours", precision="int8", **_GRAPH),
    _on_gpu("hf-bfloat16-compiled", "decode", "hf-compiled", note=f"static cache, {_COMPILED}"),
    _on_gpu("ours-bfloat16-eager", "decode", "ours", note="without graphs"),
    _on_gpu("ours-float16", "decode", "ours", dtype="float16", **_GRAPH),
    _on_gpu("llama.cpp-q4_0", "decode", "llama.cpp", precision="int4", file="q4_0.gguf", **_SMALL),
    _on_gpu("llama.cpp-bf16", "decode", "llama.cpp", file="bf16.gguf", **_SMALL),
    _on_gpu("llama.cpp-q8_0", "decode", "llama.cpp", precision="int8", file="q8_0.gguf", **_SMALL),
    _on_gpu("ours-float32", "vision", "ours", dtype="float32", **_GRAPH),  # first, as the errors are relative to it
    *(_on_gpu(f"ours-{dtype}", "vision", "ours", dtype=dtype, **_GRAPH) for dtype in _HALVES),
    *(_on_gpu(f"hf-{dtype}", "vision", "hf", dtype=dtype, note="eager") for dtype in (*_HALVES, "float32")),
    _on_gpu("hf-bfloat16-compiled", "vision", "hf-compiled", note=_COMPILED),
    _on_gpu("ours-bfloat16", "job", "ours", **_GRAPH, **_JOBS),
    _on_gpu("ours-bfloat16-64-slots", "job", "ours", slots=64, **_GRAPH, **_JOBS),
    _on_gpu("ours-bfloat16-most-slots", "job", "ours", slots="most", note="as many as fit", **_GRAPH, **_JOBS),
    *(_on_gpu(f"reference-{dtype}", "job", "reference", dtype=dtype, **_JOBS) for dtype in ("float16", "bfloat16")),
)
ENGINES = (*_ON_CPU, *_ON_GPU)
MACHINES = {device: Engine(name="machine", section="machine", program="machine", device=device) for device in DEVICES}


def engine_names() -> list[str]:
    """All names without duplicates; a name may be in several sections and on several devices."""
    return list(dict.fromkeys(engine.name for engine in ENGINES))


def chosen_engines(names: Collection[str], section: Section, device: Device = "cpu") -> list[Engine]:
    """The named engines of a section on a device."""
    return [one for one in ENGINES if (one.section, one.device) == (section, device) and one.name in names]
