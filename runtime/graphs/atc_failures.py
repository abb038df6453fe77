"""Explains what ATC prints when it fails, after the ATC user guide and reports of its users."""

import signal
from typing import Final

from llama_adapter.runtime.explanation import Explanation, first_that_fits
from llama_adapter.runtime.graphs.toolkit import SET_ENV

_LAST_LINES = 15


# `{0}` in a sentence is what the pattern's group matched. The first entry that fits is used: causes before codes, and
# specific codes before general ones.
EXPLANATIONS: Final = (
    Explanation(
        r"No module named '([\w.]+)'",
        "CANN's operator compiler lacks the Python package `{0}`",
        "install it for the `python3` on PATH, with those that usually come next: pip install numpy decorator sympy "
        "cffi pyyaml pathlib2 psutil protobuf scipy requests absl-py attrs",
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
        "ATC sees a free dimension that no flag fixes",
        "export the ONNX file with `llama-adapter export onnx`, where only the batch is free",
    ),
    Explanation(
        r"bad_alloc|cannot allocate memory|out of memory|Killed",
        "The memory is not enough for ATC",
        "convert with fewer --batch-sizes, or on a machine with more memory; the chip is not needed for it",
    ),
    Explanation(
        r"No space left on device",
        "The disk is full",
        "ATC also writes to its working folder and to ~/atc_data",
    ),
    Explanation(
        r"\bE16002\b|No parser is registered for Op",
        "An operator of the graph is not registered with ATC for its opset",
        "export with --opset 18 or 17; the lint of `llama-adapter export om` names what it knows",
    ),
    Explanation(
        r"\bE10501\b|IR for Op .* is not registered",
        "An operator of the graph is not among those of this CANN",
        "install the operator package of this CANN for the chip, or a newer CANN",
    ),
    Explanation(
        r"\bE10(?:001|002|003|004|005|007|010|014|054|055)\b",
        "ATC refuses the value of a flag",
        "its last lines name the flag; --print-command shows all of them, and a flag may be newer than this CANN",
    ),
    Explanation(
        r"\bE19999\b|Inner Error",
        "ATC failed inside",
        "run it again with --log-level info to see where; another --precision-mode (origin) may avoid the operator",
    ),
)


def explain(output: str, *, returncode: int) -> tuple[str, str]:
    """Sentence and hint for a failed run. The sentence ends with ATC's last lines."""
    sentence, hint = f"ATC failed with exit code {returncode}", "run it by hand with the line of --print-command"
    if returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        output += "\nKilled"
    if fit := first_that_fits(EXPLANATIONS, output):
        entry, found = fit
        sentence, hint = entry.sentence.format(*found.groups()), entry.hint
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    said = "".join(f"\n    {line}" for line in lines)
    return (f"{sentence}. Its last lines:{said}" if said else f"{sentence}, and said nothing"), hint
