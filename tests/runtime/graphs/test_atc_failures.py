"""Every known way of ATC to fail is explained."""

import pytest

from llama_adapter.runtime.explanation import first_that_fits
from llama_adapter.runtime.graphs.atc_failures import EXPLANATIONS, explain

OUTPUTS = [
    ("E16002: No parser is registered for Op [gelu_1, optype [ai.onnx::20::Gelu]].", 255, "opset", "--opset"),
    ("E10501: IR for Op [x, optype [Foo]] is not registered.", 255, "this CANN", "operator package"),
    ("E10001: Value [mixed] for parameter [--precision_mode_v2] is invalid.", 255, "a flag", "--print-command"),
    ("E10001: Value [Ascend99] for parameter [soc_version] is invalid.", 255, "the chip", "npu-smi"),
    ("E19999: Inner Error!\n  TraceBack (most recent call last)", 255, "failed inside", "--log-level"),
    ("Traceback ...\nModuleNotFoundError: No module named 'decorator'", 255, "package `decorator`", "pip install"),
    ("No module named 'tbe'\nE19999: Inner Error!", 255, "package `tbe`", "pip install"),
    ("E10018: shape is invalid, maybe you should set input_shape to specify its shape", 255, "free", "export onnx"),
    ("atc: error while loading shared libraries: libge.so: cannot open shared object file", 127, "libge.so", "set_env"),
    ("[ERROR] ASCEND_OPP_PATH is empty", 255, "environment of CANN", "set_env"),
    ("terminate called after throwing 'std::bad_alloc'", -6, "memory", "fewer"),
    ("ATC start working now", -9, "memory", "fewer"),
    ("ATC start working now", 137, "memory", "fewer"),
    ("write: No space left on device", 1, "disk is full", "atc_data"),
]


@pytest.mark.parametrize(("output", "returncode", "said", "hint"), OUTPUTS)
def test_a_failure_is_explained(output: str, returncode: int, said: str, hint: str) -> None:
    sentence, told_hint = explain(output, returncode=returncode)

    assert said in sentence.partition(". Its last lines")[0]
    assert hint in told_hint
    assert output.splitlines()[-1] in sentence


def test_every_explanation_has_an_example() -> None:
    found = set()
    for output, code, _, _ in OUTPUTS:
        entry = first_that_fits(EXPLANATIONS, f"{output}\nKilled" if code in (-9, 137) else output)
        assert entry is not None
        found.add(entry[0].sentence)

    assert found == {entry.sentence for entry in EXPLANATIONS}


def test_an_unknown_failure_shows_what_atc_said_last() -> None:
    sentence, hint = explain("\n".join(f"line {number}" for number in range(40)), returncode=3)

    assert sentence.startswith("ATC failed with exit code 3. Its last lines:")
    assert "line 39" in sentence
    assert "line 24" not in sentence
    assert "--print-command" in hint


def test_silence_is_told_as_silence() -> None:
    assert explain("\n\n", returncode=3)[0] == "ATC failed with exit code 3, and said nothing"
