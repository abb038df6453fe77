"""Checks whether ATC is likely to accept an ONNX file: opset, operators and inputs.

The table of operators comes from the plug-ins of CANN (`.OriginOpType(...)`, hicann/ops-nn, ops-math, ops-cv) and the
ATC user guide. It covers names and opsets. Only ATC and the chip check attributes, kernels and precision.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.gears import MAX_RANK
from llama_adapter.runtime.graphs.graph import Graph, Node
from llama_adapter.runtime.graphs.known_names import known_names

OPSETS: Final = (11, 18)  # "ai.onnx opset v11 to v18" of --framework=5
INPUT_DTYPES: Final = ("float32", "float16")
# The ATC guide lists only INPUT_DTYPES for ONNX, but ATC also converts models with token ids of these types.
TOKEN_DTYPES: Final = ("int32", "int64")

# Operator -> first and last opset in which ATC supports it.
REGISTERED: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(known_names("atc")["operators"], OPSETS),
    "LayerNormalization": (17, 18),
    "Trilu": (14, 18),
    "HardSwish": (14, 18),
    "CastLike": (15, 18),
    "ReduceL1": (11, 17),
    "ReduceL2": (11, 17),
}
# Operator that ATC supports in no opset -> hint.
UNREGISTERED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("Gelu", "RMSNormalization", "Attention", "RotaryEmbedding"),
        "export with opset 18, which builds it from operators that ATC knows",
    ),
    **dict.fromkeys(
        ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"),
        "export the model before quantisation, and let ATC choose the precision",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Complaint:
    """Something that ATC refuses (`error`), or that is not in the table (`warning`)."""

    level: Literal["error", "warning"] = "error"
    subject: str  # an operator, `input NAME`, or `model`
    count: int = 1  # number of affected nodes
    sentence: str
    hint: str


def lint_graph(graph: Graph, *, has_dims: bool = False) -> list[Complaint]:
    """Complaints about an ONNX graph, errors first. `has_dims`: dimensions other than the batch get gears too."""
    faults = (fault for port in graph.inputs for fault in _inputs(port, has_dims=has_dims))
    complaints = [*_operators(graph), *_splits(graph), *faults]
    return sorted(complaints, key=lambda complaint: complaint.level != "error")


def _operators(graph: Graph) -> Iterator[Complaint]:
    first, last = OPSETS
    is_known_opset = first <= graph.opset <= last
    if not is_known_opset:
        yield Complaint(
            subject="model",
            count=len(graph.nodes),
            sentence=f"The model has opset {graph.opset}, and ATC accepts {first} to {last}",
            hint="export it again with opset 18",
        )
    for name, count in Counter(node.qualified for node in graph.nodes if node.domain).items():
        yield Complaint(
            subject=name,
            count=count,
            sentence=f"{name} is not an operator of ONNX's own domain, the only one that ATC knows",
            hint="export without optimising for another runtime, and without local functions",
        )
    for name, count in Counter(node.operator for node in graph.nodes if not node.domain).items():
        span = REGISTERED.get(name)
        if span is not None:
            if is_known_opset and not span[0] <= graph.opset <= span[1]:
                sentence = f"ATC knows {name} in opsets {span[0]} to {span[1]}, and this model has {graph.opset}"
                yield Complaint(subject=name, count=count, sentence=sentence, hint="export with another opset")
        elif name in UNREGISTERED:
            sentence = f"ATC knows {name} in no opset"
            yield Complaint(subject=name, count=count, sentence=sentence, hint=UNREGISTERED[name])
        else:
            yield Complaint(
                level="warning",
                subject=name,
                count=count,
                sentence=f"{name} is not in the table of operators that ATC is known to accept",
                hint="look it up in the operator list of your CANN, or try the conversion",
            )


def _splits(graph: Graph) -> Iterator[Complaint]:
    """Complaints about Split. ATC's plug-in ignores the sign of `axis`, and reads sizes before shapes are known."""

    def lacks_sizes(node: Node) -> bool:
        return node.operator == "Split" and "num_outputs" in node.attributes and node.num_inputs == 1

    nodes = [node for node in graph.nodes if lacks_sizes(node)]
    if nodes:
        is_negative = any((node.attributes.get("axis") or 0) < 0 for node in nodes)
        yield Complaint(
            level="error" if is_negative else "warning",
            subject="Split",
            count=len(nodes),
            sentence="Split gets a number of parts instead of their sizes"
            + (", along an axis counted from the end" if is_negative else ""),
            hint="export with the sizes as an input: torch's `split` with a list, along an axis counted from the front",
        )


def _inputs(port: Port, *, has_dims: bool) -> Iterator[Complaint]:
    def complaint(fault: str, hint: str, level: Literal["error", "warning"] = "error") -> Complaint:
        sentence = f"The input `{port.name} {port}` has {fault}"
        return Complaint(level=level, subject=f"input {port.name}", sentence=sentence, hint=hint)

    if port.dtype == "uint8":
        yield complaint(
            "type uint8, which ATC accepts only with an AIPP configuration", "use float16, which holds 0..255 exactly"
        )
    elif has_dims and port.dtype == "bool":
        hint = "if ATC refuses it, run the decoder in torch, or export it with --format onnx"
        yield complaint("type bool, which the ATC guide lists for TensorFlow alone", hint, "warning")
    elif not (port.dtype in INPUT_DTYPES or (has_dims and port.dtype in TOKEN_DTYPES)):
        yield complaint(
            f"type {port.dtype}, and ATC accepts float32 or float16", "export it with another type of input"
        )
    if len(port.shape) > MAX_RANK:
        yield complaint(f"{len(port.shape)} dimensions, and ATC accepts {MAX_RANK} at most", "join some of them")
    if any(dim > 0 for dim in port.free_dims) and not has_dims:
        dims = ", ".join(map(str, port.free_dims))
        yield complaint(f"free dimensions {dims}, and only the batch (0) may be free", "export it with fixed sizes")
