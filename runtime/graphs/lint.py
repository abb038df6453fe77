"""Whether ATC is likely to accept an ONNX file: its operators and opset by a table, and its inputs.

The table comes from the operator plug-ins of CANN (`.OriginOpType(...)`, hicann/ops-nn, ops-math, ops-cv) and the ATC
user guide. It covers names and opsets; attributes, kernels and precision show only when ATC and the chip run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from llama_adapter.runtime.graphs.graph import Graph, Node
from llama_adapter.runtime.graphs.ports import Port

Level = Literal["error", "warning"]

OPSETS: Final = (11, 18)  # "ai.onnx opset v11 to v18" of --framework=5
INPUT_DTYPES: Final = ("float32", "float16")
MAX_INPUT_RANK: Final = 4  # of --input_format=ND
_ALL: Final = (11, 18)

_EVERYWHERE = """
    Abs Add And ArgMax BatchNormalization Cast Clip Concat Constant ConstantOfShape Conv Cos CumSum Div Dropout Einsum
    Equal Erf Exp Expand Flatten Gather GatherElements GatherND Gemm GreaterOrEqual Identity If InstanceNormalization
    Less LogSoftmax MatMul Max Min Mod Mul Neg Not Or Pad Pow Range Reciprocal ReduceMax ReduceMean ReduceSum Relu
    Reshape Resize ScatterElements ScatterND Shape Sigmoid Sin Slice Softmax Split Sqrt Squeeze Sub Tanh Tile TopK
    Transpose Unsqueeze Where
"""
# Operator -> first and last opset in which it is registered.
REGISTERED: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(_EVERYWHERE.split(), _ALL),
    "LayerNormalization": (17, 18),
    "Trilu": (14, 18),
    "HardSwish": (14, 18),
    "CastLike": (15, 18),
    "ReduceL1": (11, 17),
    "ReduceL2": (11, 17),
}
# Operators that are registered in no opset, and what to do about them.
_OPSET_18 = "export with opset 18, where it is made of operators that ATC has"
_PLAIN = "export the model before it is quantised, and let ATC choose the precision"
UNREGISTERED: Final[Mapping[str, str]] = {
    "Gelu": _OPSET_18,
    "RMSNormalization": _OPSET_18,
    "Attention": _OPSET_18,
    "RotaryEmbedding": _OPSET_18,
    "QuantizeLinear": _PLAIN,
    "DequantizeLinear": _PLAIN,
    "DynamicQuantizeLinear": _PLAIN,
    "MatMulInteger": _PLAIN,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Complaint:
    """Something that ATC refuses (`error`), or that the table does not know (`warning`)."""

    level: Level
    operator: str  # or `input NAME`, or `model`
    opset: int
    count: int  # of the affected nodes
    sentence: str
    hint: str


def lint_graph(graph: Graph) -> list[Complaint]:
    """Complaints about any ONNX graph, errors first."""
    complaints = [complaint for rule in _RULES for complaint in rule(graph)]
    return sorted(complaints, key=lambda complaint: complaint.level != "error")


def _opset(graph: Graph) -> Iterator[Complaint]:
    first, last = OPSETS
    if not first <= graph.opset <= last:
        yield Complaint(
            level="error",
            operator="model",
            opset=graph.opset,
            count=len(graph.nodes),
            sentence=f"The model is of opset {graph.opset}, and ATC takes {first} to {last}",
            hint="export it again with opset 18",
        )


def _operators(graph: Graph) -> Iterator[Complaint]:
    for operator, count in Counter(node.operator for node in graph.nodes if not node.domain).items():
        span = REGISTERED.get(operator)
        if span is not None and span[0] <= graph.opset <= span[1]:
            continue
        level: Level = "error"
        hint = "export with another opset"
        if span is not None:
            if not OPSETS[0] <= graph.opset <= OPSETS[1]:
                continue  # said of the model already
            sentence = f"{operator} is registered with ATC for opsets {span[0]} to {span[1]}, and this is {graph.opset}"
        elif operator in UNREGISTERED:
            sentence, hint = f"{operator} is registered with ATC for no opset", UNREGISTERED[operator]
        else:
            level, hint = "warning", "look it up in the operator list of your CANN, or just try"
            sentence = f"{operator} is not in the table of operators that are known to be registered with ATC"
        yield Complaint(level=level, operator=operator, opset=graph.opset, count=count, sentence=sentence, hint=hint)


def _domains(graph: Graph) -> Iterator[Complaint]:
    for operator, count in Counter(node.qualified for node in graph.nodes if node.domain).items():
        yield Complaint(
            level="error",
            operator=operator,
            opset=graph.opset,
            count=count,
            sentence=f"{operator} is of another domain than ONNX's own, the only one that ATC knows",
            hint="export without optimising for another runtime, and without local functions",
        )


def _splits(graph: Graph) -> Iterator[Complaint]:
    """The plug-in of Split ignores the sign of `axis` and reads sizes before shapes are known."""

    def is_blind(node: Node) -> bool:
        return node.operator == "Split" and "num_outputs" in node.attributes and node.num_inputs == 1

    blind = [node for node in graph.nodes if is_blind(node)]
    if blind:
        is_negative = any((node.attributes.get("axis") or 0) < 0 for node in blind)
        yield Complaint(
            level="error" if is_negative else "warning",
            operator="Split",
            opset=graph.opset,
            count=len(blind),
            sentence="Split is given a number of parts instead of their sizes"
            + (", along an axis counted from the end" if is_negative else ""),
            hint="export with the sizes as an input: torch's `split` with a list, along an axis counted from the front",
        )


def _inputs(graph: Graph) -> Iterator[Complaint]:
    for port in graph.inputs:
        for sentence, hint in _input_faults(port):
            yield Complaint(
                level="error",
                operator=f"input {port.name}",
                opset=graph.opset,
                count=1,
                sentence=f"The input `{port.name} {port}` {sentence}",
                hint=hint,
            )


def _input_faults(port: Port) -> Iterator[tuple[str, str]]:
    if port.dtype == "uint8":
        yield "is of uint8, which ATC takes only with a configuration for AIPP", "take float16: it holds 0..255 exactly"
    elif port.dtype not in INPUT_DTYPES:
        yield f"is of {port.dtype}, where ATC wants float32 or float16", "export it with another type of input"
    if len(port.shape) > MAX_INPUT_RANK:
        yield f"has {len(port.shape)} dimensions, and ATC takes at most {MAX_INPUT_RANK}", "join some of them"
    if any(dim > 0 for dim in port.free_dims):
        yield (
            f"is free in dimension {', '.join(map(str, port.free_dims))}, where only the batch, 0, may be",
            "export it with fixed sizes",
        )


_RULES: Final[tuple[Callable[[Graph], Iterator[Complaint]], ...]] = (_opset, _domains, _operators, _splits, _inputs)
