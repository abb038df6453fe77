"""The engines by name. This module imports no vendor package."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from llama_adapter.runtime.schemes import Precision

Section = Literal["machine", "decode", "job", "vision"]  # what one child process measures


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
ENGINES: tuple[Engine, ...] = (
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
MACHINE = Engine(name="machine", section="machine", program="machine")


def engine_names() -> list[str]:
    """All names without duplicates; a name may be in several sections."""
    return list(dict.fromkeys(engine.name for engine in ENGINES))


def chosen_engines(names: Collection[str], section: Section) -> list[Engine]:
    """The named engines of a section."""
    return [engine for engine in ENGINES if engine.section == section and engine.name in names]
