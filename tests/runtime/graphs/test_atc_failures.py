"""Every known failure of ATC has an explanation."""

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.runtime.explanation import first_that_fits, read_explanations
from llama_adapter.runtime.graphs.atc import explain_failure

OUTPUTS = [
    "E16002: No parser is registered for Op [gelu_1, optype [ai.onnx::20::Gelu]].",
    "E10501: IR for Op [x, optype [Foo]] is not registered.",
    "E10001: Value [mixed] for parameter [--precision_mode_v2] is invalid.",
    "E10001: Value [Ascend99] for parameter [soc_version] is invalid.",
    "E19999: Inner Error!\n  TraceBack (most recent call last)",
    "Traceback ...\nModuleNotFoundError: No module named 'decorator'\nE19999: Inner Error!",
    "E10018: shape is invalid, maybe you should set input_shape to specify its shape",
    "atc: error while loading shared libraries: libge.so: cannot open shared object file",
    "[ERROR] ASCEND_OPP_PATH is empty",
    "terminate called after throwing 'std::bad_alloc'",
    "write: No space left on device",
]


def test_each_failure_has_its_explanation(snapshot: SnapshotAssertion) -> None:
    explained = ["\n".join(explain_failure(output, returncode=255)) for output in OUTPUTS]

    assert "\n\n".join(explained) == snapshot
    table = read_explanations("atc")
    found = {entry[0] for output in OUTPUTS if (entry := first_that_fits(table, output))}
    assert found == set(table)


@pytest.mark.parametrize("returncode", [-9, 137])
def test_a_killed_atc_ran_out_of_memory(returncode: int) -> None:
    killed, _ = explain_failure("ATC start working now", returncode=returncode)
    out_of_memory, _ = explain_failure("out of memory", returncode=1)

    assert killed.partition(".")[0] == out_of_memory.partition(".")[0]


def test_an_unknown_failure_shows_the_last_lines() -> None:
    sentence, _ = explain_failure("\n".join(f"line {number}" for number in range(40)), returncode=3)

    assert sentence.startswith("ATC failed with exit code 3. Its last lines:")
    assert "line 39" in sentence
    assert "line 24" not in sentence
    assert explain_failure("\n\n", returncode=3)[0] == "ATC failed with exit code 3, without any output"
