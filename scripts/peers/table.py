"""The engines by name: what each can be measured in, and how it is opened. Nothing vendor is imported here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from scripts.peers.sizes import Part

Section = Literal["machine", "decode", "job", "vision"]  # what one child process measures
SECTIONS: tuple[Section, ...] = get_args(Section)
PARTS_OF: Mapping[Section, tuple[Part, ...]] = {
    "machine": ("ceiling",),
    "decode": ("prefill", "decode"),
    "job": ("job",),
    "vision": ("vision",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One way of running a model: a program, a number type, and the files it needs beside the weights."""

    name: str
    section: Section
    program: str  # a key of `scripts.peers.opening.OPENERS`
    dtype: str = "float32"
    precision: Literal["float", "int8"] = "float"
    file: str = ""  # in the work folder; see `scripts.peers.files`
    by_default: bool = True
    note: str = ""


def _ours(section: Section) -> tuple[Engine, ...]:
    return (
        Engine(name="ours-float32", section=section, program="ours"),
        Engine(name="ours-bfloat16", section=section, program="ours", dtype="bfloat16"),
        Engine(name="ours-int8", section=section, program="ours", precision="int8"),
        Engine(
            name="ours-int8-bfloat16",
            section=section,
            program="ours",
            dtype="bfloat16",
            precision="int8",
            by_default=False,
            note="int8 weights, all else in bfloat16",
        ),
    )


ENGINES: tuple[Engine, ...] = (
    *_ours("decode"),
    Engine(name="hf-float32", section="decode", program="hf-dynamic", note="eager, growing cache"),
    Engine(name="hf-bfloat16", section="decode", program="hf-dynamic", dtype="bfloat16", note="eager, growing cache"),
    Engine(
        name="hf-bfloat16-static", section="decode", program="hf-static", dtype="bfloat16", note="eager, static cache"
    ),
    Engine(
        name="hf-bfloat16-compiled",
        section="decode",
        program="hf-compiled",
        dtype="bfloat16",
        by_default=False,
        note="static cache, steps by torch.compile",
    ),
    Engine(name="llama.cpp-bf16", section="decode", program="llama.cpp", dtype="bfloat16", file="bf16.gguf"),
    Engine(name="llama.cpp-q8_0", section="decode", program="llama.cpp", precision="int8", file="q8_0.gguf"),
    Engine(name="llama.cpp-q4_0", section="decode", program="llama.cpp", precision="int8", file="q4_0.gguf"),
    *_ours("job"),
    Engine(name="reference-float32", section="job", program="reference", note="as the reference's loop does"),
    *_ours("vision"),
    Engine(name="hf-float32", section="vision", program="hf", note="eager"),
    Engine(name="hf-bfloat16", section="vision", program="hf", dtype="bfloat16", note="eager"),
    Engine(name="onnxruntime-float32", section="vision", program="onnxruntime", file="tower.onnx"),
    Engine(
        name="onnxruntime-int8",
        section="vision",
        program="onnxruntime",
        precision="int8",
        file="tower-int8.onnx",
        note="dynamic quantisation",
    ),
    Engine(name="openvino-float32", section="vision", program="openvino", file="tower.onnx"),
    Engine(
        name="openvino-bfloat16",
        section="vision",
        program="openvino",
        dtype="bfloat16",
        file="tower.onnx",
        by_default=False,
    ),
    Engine(
        name="openvino-int8",
        section="vision",
        program="openvino",
        precision="int8",
        file="tower-int8.xml",
        note="post-training quantisation by NNCF",
    ),
)
MACHINE = Engine(name="machine", section="machine", program="machine")


def engine_names() -> list[str]:
    """All names, each once; a name may stand for a decoder, a job and an encoder."""
    return list(dict.fromkeys(engine.name for engine in ENGINES))


def chosen_engines(names: Collection[str] | None, section: Section) -> list[Engine]:
    """Engines of a section: those named, or by default all but the slow options."""
    return [
        engine
        for engine in ENGINES
        if engine.section == section and (engine.by_default if names is None else engine.name in names)
    ]


def find_engine(section: Section, name: str) -> Engine:
    """The engine of that name; raises KeyError for one that is not in the table."""
    table = {(engine.section, engine.name): engine for engine in (MACHINE, *ENGINES)}
    return table[section, name]
