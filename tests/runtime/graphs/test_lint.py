"""The lint finds what ATC would refuse, in any ONNX file."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.lint import Complaint, lint_graph


def write(
    path: Path,
    *operators: str,
    opset: int = 18,
    dtype: int = TensorProto.FLOAT,
    shape: tuple[Any, ...] = ("batch", 4),
    nodes: list[onnx.NodeProto] | None = None,
) -> Path:
    """A graph of these operators one after the other; ATC's rules do not look at what they compute."""
    names = ["input", *(f"value{number}" for number in range(len(operators) + len(nodes or [])))]
    made = [
        helper.make_node(operator.rpartition(".")[2], [before], [after], domain=operator.rpartition(".")[0])
        for operator, before, after in zip(operators, names, names[1:], strict=False)
    ]
    graph = helper.make_graph(
        [*made, *(nodes or [])],
        "test",
        [helper.make_tensor_value_info("input", dtype, shape)],
        [helper.make_tensor_value_info(names[-1], dtype, shape)],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports), path)
    return path


def lint(path: Path) -> list[Complaint]:
    return lint_graph(read_graph(path))


def only(complaints: list[Complaint]) -> Complaint:
    assert len(complaints) == 1
    return complaints[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("opset", [11, 18])
def test_operators_of_the_table_are_fine(file: Path, opset: int) -> None:
    assert lint(write(file, "Sigmoid", "Relu", "Softmax", opset=opset)) == []


def test_gelu_is_refused_and_told_once_with_its_count(file: Path) -> None:
    complaint = only(lint(write(file, "Gelu", "Relu", "Gelu", opset=18)))

    assert (complaint.level, complaint.operator, complaint.opset, complaint.count) == ("error", "Gelu", 18, 2)
    assert "opset 18" in complaint.hint


@pytest.mark.parametrize(
    ("operator", "opset", "is_fine"),
    [
        ("LayerNormalization", 16, False),
        ("LayerNormalization", 17, True),
        ("ReduceL2", 17, True),
        ("ReduceL2", 18, False),
        ("Trilu", 13, False),
        ("CastLike", 15, True),
    ],
)
def test_an_operator_has_its_opsets(file: Path, operator: str, opset: int, is_fine: bool) -> None:
    complaints = lint(write(file, operator, opset=opset))

    assert complaints == [] if is_fine else (only(complaints).level == "error" and str(opset) in complaints[0].sentence)


@pytest.mark.parametrize("opset", [10, 19, 20])
def test_a_model_of_another_opset_is_refused_as_a_whole(file: Path, opset: int) -> None:
    complaint = only(lint(write(file, "Relu", opset=opset)))

    assert (complaint.level, complaint.operator) == ("error", "model")


def test_a_foreign_domain_is_refused_and_an_unknown_operator_is_a_warning_that_comes_last(file: Path) -> None:
    complaints = lint(write(file, "Hardmax", "Gelu", "com.microsoft.FusedMatMul"))

    assert [(complaint.level, complaint.operator) for complaint in complaints] == [
        ("error", "com.microsoft.FusedMatMul"),
        ("error", "Gelu"),
        ("warning", "Hardmax"),
    ]


@pytest.mark.parametrize(("axis", "level"), [(-1, "error"), (1, "warning")])
def test_a_split_without_sizes_is_told(file: Path, axis: int, level: str) -> None:
    node = helper.make_node("Split", ["input"], ["value0", "other"], axis=axis, num_outputs=2)

    assert only(lint(write(file, nodes=[node]))).level == level


def test_a_split_with_sizes_is_fine(file: Path) -> None:
    node = helper.make_node("Split", ["input", "sizes"], ["value0", "other"], axis=1)

    assert lint(write(file, nodes=[node])) == []


def test_operators_inside_of_others_are_looked_at(file: Path) -> None:
    inner = helper.make_graph([helper.make_node("Gelu", ["input"], ["x"])], "inner", [], [])
    node = helper.make_node("If", ["input"], ["value0"], then_branch=inner, else_branch=inner)

    complaint = only(lint(write(file, nodes=[node])))

    assert (complaint.operator, complaint.count) == ("Gelu", 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": TensorProto.UINT8}, "AIPP"),
        ({"dtype": TensorProto.INT64}, "int64"),
        ({"dtype": TensorProto.BFLOAT16}, "bfloat16"),
        ({"shape": (1, 2, 3, 4, 5)}, "5 dimensions"),
        ({"shape": ("batch", "height", 3)}, "free in dimension 0, 1"),
        ({"shape": (1, "width")}, "free in dimension 1"),
    ],
)
def test_inputs_that_atc_does_not_take_are_told(file: Path, settings: Any, said: str) -> None:
    complaint = only(lint(write(file, "Relu", **settings)))

    assert (complaint.level, complaint.operator) == ("error", "input input")
    assert said in complaint.sentence


def test_weights_are_no_inputs(file: Path) -> None:
    model = onnx.load(write(file, "Relu"))
    model.graph.input.append(helper.make_tensor_value_info("weight", TensorProto.INT64, (1,)))
    model.graph.initializer.append(helper.make_tensor("weight", TensorProto.INT64, (1,), [3]))
    onnx.save(model, file)

    assert lint(file) == []
    assert [port.name for port in read_graph(file).inputs] == ["input"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no ONNX file"),
        (b"nothing of this", "is no ONNX file"),
        (b"\x08\x01", "is no ONNX file"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_onnx_is_told(file: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        file.write_bytes(content)

    with pytest.raises(GraphError, match=said):
        lint(file)
