"""Explains the output of a failed ATC. The table follows the ATC user guide and reports of users."""

import signal
from typing import Final

from llama_adapter.runtime.explanation import Explanation, first_that_fits
from llama_adapter.runtime.graphs.toolkit import SET_ENV

_LAST_LINES = 15


# `{0}` in a sentence is the pattern's group. The first match is used, so causes come before codes, and specific codes
# before general ones.
EXPLANATIONS: Final = (
    Explanation(
        r"No module named '([\w.]+)'",
        "CANN's operator compiler lacks the Python package `{0}`",
        "install it for the `python3` on PATH, with the packages that are usually missing too: pip install numpy "
        "decorator sympy cffi pyyaml pathlib2 psutil protobuf scipy requests absl-py attrs",
    ),
    Explanation(
        r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "ATC cannot find its own library {0}: the environment of CANN is not set",
        SET_ENV,
    ),
    Explanation(
        r"ASCEND_OPP_PATH|opp path .*(?:empty|not exist|invalid)",
        "ATC cannot find its operators: the environment of CANN is not set",
        SET_ENV,
    ),
    Explanation(
        r"soc_version.*(?:invalid|not support|unsupported|is wrong)|(?:invalid|unsupported) .*soc_version"
        r"|soc_version\[?\S*\]? .*does not exist|platform info .*fail",
        "ATC does not know the chip, or its operators for that chip are not installed",
        "compare --soc-version with `npu-smi info` (Ascend310P3, Ascend910B3, ...); since CANN 8.5 the package of "
        "operators for the chip is installed separately",
    ),
    Explanation(
        r"maybe you should set input_shape",
        "The graph has a free dimension, and no flag fixes it",
        "export the ONNX file with `llama-adapter export onnx`, where only the batch is free",
    ),
    Explanation(
        r"bad_alloc|cannot allocate memory|out of memory|Killed",
        "ATC ran out of memory",
        "convert fewer --batch-sizes, or on a machine with more memory; no chip is needed for it",
    ),
    Explanation(
        r"No space left on device",
        "The disk is full",
        "ATC also writes to its working folder and to ~/atc_data",
    ),
    Explanation(
        r"\bE16002\b|No parser is registered for Op",
        "ATC does not know an operator of the graph in its opset",
        "export with --opset 18 or 17; `llama-adapter export om` lists operators that ATC does not know",
    ),
    Explanation(
        r"\bE10501\b|IR for Op .* is not registered",
        "This CANN lacks an operator of the graph",
        "install the operator package of this CANN for the chip, or a newer CANN",
    ),
    Explanation(
        r"\bE10(?:001|002|003|004|005|007|010|014|054|055)\b",
        "ATC refuses the value of a flag",
        "its last lines name the flag, which may be newer than this CANN; --print-command shows all flags",
    ),
    Explanation(
        r"\bE19999\b|Inner Error",
        "ATC failed with an internal error",
        "run it again with --log-level info to see where; another --precision-mode (origin) may avoid the operator",
    ),
)


def explain(output: str, *, returncode: int) -> tuple[str, str]:
    """A sentence and a hint for a failed run. The sentence ends with ATC's last lines."""
    sentence, hint = f"ATC failed with exit code {returncode}", "run it by hand with the line of --print-command"
    if returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        output += "\nKilled"
    if fit := first_that_fits(EXPLANATIONS, output):
        entry, found = fit
        sentence, hint = entry.sentence.format(*found.groups()), entry.hint
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    shown = "".join(f"\n    {line}" for line in lines)
    return (f"{sentence}. Its last lines:{shown}" if shown else f"{sentence}, without any output"), hint
