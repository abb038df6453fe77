"""The lint finds everything that ATC would refuse, in any ONNX file."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from syrupy.assertion import SnapshotAssertion

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import Complaint, lint_graph


def write(
    path: Path,
    *operators: str,
    opset: int = 18,
    dtype: int = TensorProto.FLOAT,
    shape: tuple[Any, ...] = ("batch", 4),
    node: onnx.NodeProto | None = None,
) -> Path:
    """A graph of these operators in sequence, followed by `node`. The graph need not compute anything sensible."""
    names = ["input", *(f"value{number}" for number in range(len(operators) + (node is not None)))]
    nodes = [
        helper.make_node(operator.rpartition(".")[2], [before], [after], domain=operator.rpartition(".")[0])
        for operator, before, after in zip(operators, names, names[1:], strict=False)
    ]
    graph = helper.make_graph(
        [*nodes, *([] if node is None else [node])],
        "test",
        [helper.make_tensor_value_info("input", dtype, shape)],
        [helper.make_tensor_value_info(names[-1], dtype, shape)],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports), path)
    return path


def lint(path: Path) -> list[Complaint]:
    return lint_graph(read_graph(path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


@pytest.mark.parametrize(
    ("operators", "opset", "subjects"),
    [
        (["Sigmoid", "Relu", "Softmax"], 11, []),
        (["Sigmoid", "Relu", "Softmax"], 18, []),
        (["LayerNormalization"], 16, ["LayerNormalization"]),
        (["LayerNormalization"], 17, []),
        (["ReduceL2"], 17, []),
        (["ReduceL2"], 18, ["ReduceL2"]),
        (["Trilu"], 13, ["Trilu"]),
        (["CastLike"], 15, []),
        (["Relu", "LayerNormalization"], 10, ["model"]),
        (["Relu"], 19, ["model"]),
        (["Gelu", "Relu", "Gelu"], 18, ["Gelu"]),
        (["Hardmax", "Gelu", "com.microsoft.FusedMatMul"], 18, ["com.microsoft.FusedMatMul", "Gelu", "Hardmax"]),
    ],
)
def test_operators_are_compared_with_the_table(
    file: Path, operators: list[str], opset: int, subjects: list[str]
) -> None:
    complaints = lint(write(file, *operators, opset=opset))

    assert [complaint.subject for complaint in complaints] == subjects
    assert {c.subject for c in complaints if c.level == "warning"} == {"Hardmax"} & set(subjects)
    assert all(c.count == operators.count(c.subject) for c in complaints if c.subject in operators)


@pytest.mark.parametrize(
    ("inputs", "attributes", "levels"),
    [
        (["input"], {"axis": -1, "num_outputs": 2}, ["error"]),
        (["input"], {"axis": 1, "num_outputs": 2}, ["warning"]),
        (["input", "sizes"], {"axis": 1}, []),
    ],
)
def test_a_split_needs_the_sizes_of_its_parts(
    file: Path, inputs: list[str], attributes: dict[str, int], levels: list[str]
) -> None:
    node = helper.make_node("Split", inputs, ["value0", "other"], **attributes)

    assert [complaint.level for complaint in lint(write(file, node=node))] == levels


def test_operators_inside_other_operators_are_checked(file: Path) -> None:
    inner = helper.make_graph([helper.make_node("Gelu", ["input"], ["x"])], "inner", [], [])
    node = helper.make_node("If", ["input"], ["value0"], then_branch=inner, else_branch=inner)

    [complaint] = lint(write(file, node=node))

    assert (complaint.subject, complaint.count) == ("Gelu", 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": TensorProto.UINT8},
        {"dtype": TensorProto.INT64},
        {"dtype": TensorProto.BFLOAT16},
        {"shape": (1, 2, 3, 4, 5)},
        {"shape": ("batch", "height", 3)},
        {"shape": (1, "width")},
    ],
)
def test_inputs_that_atc_refuses_are_errors(file: Path, settings: Any) -> None:
    [complaint] = lint(write(file, "Relu", **settings))

    assert (complaint.level, complaint.subject) == ("error", "input input")


def test_complaints_as_they_are_shown(file: Path, snapshot: SnapshotAssertion) -> None:
    split = helper.make_node("Split", ["input"], ["value3", "other"], axis=-1, num_outputs=2)
    operators = ("Hardmax", "Gelu", "ReduceL1", "QuantizeLinear", "com.microsoft.FusedMatMul")
    graphs = [
        write(file, *operators, node=split, dtype=TensorProto.UINT8, shape=(1, 2, 3, 4, "width")),
        write(file.with_name("old.onnx"), "Relu", opset=10, dtype=TensorProto.INT64),
    ]

    complaints = [complaint for graph in graphs for complaint in lint(graph)]

    assert "\n".join(f"{c.level} {c.sentence} ({c.count} x)\n    {c.hint}" for c in complaints) == snapshot


def test_weights_are_not_inputs(file: Path) -> None:
    model = onnx.load(write(file, "Relu"))
    model.graph.input.append(helper.make_tensor_value_info("weight", TensorProto.INT64, (1,)))
    model.graph.initializer.append(helper.make_tensor("weight", TensorProto.INT64, (1,), [3]))
    onnx.save(model, file)

    assert lint(file) == []
    assert [port.name for port in read_graph(file).inputs] == ["input"]


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x01", None])
def test_a_missing_or_foreign_file_is_refused(file: Path, content: bytes | None) -> None:
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(GraphError, match="does not exist" if content is None else "is no ONNX file"):
        lint(file)
