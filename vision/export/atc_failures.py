"""What ATC prints when it fails -> a sentence and what to do. From the ATC user guide and reports of its users."""

import re
import signal
from dataclasses import dataclass
from typing import Final

_LAST_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What a pattern in ATC's output means; `{0}` in the sentence is what the pattern's group found."""

    pattern: re.Pattern[str]
    sentence: str
    hint: str


def _explanation(pattern: str, sentence: str, hint: str) -> Explanation:
    return Explanation(pattern=re.compile(pattern, re.IGNORECASE), sentence=sentence, hint=hint)


_SET_ENV = (
    "run `source /usr/local/Ascend/ascend-toolkit/set_env.sh` (newer CANN: .../cann/set_env.sh) in this shell first"
)
# The first that fits is told: causes before codes, and codes from the particular to the general.
EXPLANATIONS: Final = (
    _explanation(
        r"No module named '([\w.]+)'",
        "CANN's operator compiler lacks the Python package `{0}`",
        "install it for the `python3` on PATH, with those that usually come next: pip install numpy decorator sympy "
        "cffi pyyaml pathlib2 psutil protobuf scipy requests absl-py attrs",
    ),
    _explanation(
        r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "ATC cannot find its own library {0}: the environment of CANN is not set",
        _SET_ENV,
    ),
    _explanation(
        r"ASCEND_OPP_PATH|opp path .*(?:empty|not exist|invalid)",
        "ATC cannot find its operators: the environment of CANN is not set",
        _SET_ENV,
    ),
    _explanation(
        r"soc_version.*(?:invalid|not support|unsupported|is wrong)|(?:invalid|unsupported) .*soc_version"
        r"|soc_version\[?\S*\]? .*does not exist|platform info .*fail",
        "ATC does not know the chip, or its operators for that chip are not installed",
        "compare --soc-version with `npu-smi info` (Ascend310P3, Ascend910B3, ...); since CANN 8.5 the package of "
        "operators for the chip is installed apart",
    ),
    _explanation(
        r"maybe you should set input_shape",
        "ATC sees a free dimension that no flag settles",
        "export the ONNX file with `llama-adapter export onnx`, where only the batch is free",
    ),
    _explanation(
        r"bad_alloc|cannot allocate memory|out of memory|Killed",
        "The memory is not enough for ATC",
        "convert with fewer --batch-sizes, or on a machine with more memory; the chip is not needed for it",
    ),
    _explanation(
        r"No space left on device",
        "The disk is full",
        "ATC also writes to its working folder and to ~/atc_data",
    ),
    _explanation(
        r"\bE16002\b|No parser is registered for Op",
        "An operator of the graph is not registered with ATC for its opset",
        "export with --opset 18 or 17; the lint of `llama-adapter export om` names what it knows",
    ),
    _explanation(
        r"\bE10501\b|IR for Op .* is not registered",
        "An operator of the graph is not among those of this CANN",
        "install the operator package of this CANN for the chip, or a newer CANN",
    ),
    _explanation(
        r"\bE10(?:001|002|003|004|005|007|010|014|054|055)\b",
        "ATC refuses the value of a flag",
        "its last lines name the flag; --print-command shows all of them, and a flag may be newer than this CANN",
    ),
    _explanation(
        r"\bE19999\b|Inner Error",
        "ATC failed inside",
        "run it again with --log-level info to see where; another --precision-mode (origin) may avoid the operator",
    ),
)


def explain(output: str, *, returncode: int) -> tuple[str, str]:
    """Sentence and hint for a failed run; ATC's own last lines are in the sentence."""
    sentence, hint = f"ATC failed with exit code {returncode}", "run it by hand with the line of --print-command"
    if returncode in (-signal.SIGKILL, 128 + signal.SIGKILL):
        output += "\nKilled"
    for explanation in EXPLANATIONS:
        if found := explanation.pattern.search(output):
            sentence, hint = explanation.sentence.format(*found.groups()), explanation.hint
            break
    lines = [line.rstrip() for line in output.splitlines() if line.strip()][-_LAST_LINES:]
    said = "".join(f"\n    {line}" for line in lines)
    return (f"{sentence}. Its last lines:{said}" if said else f"{sentence}, and said nothing"), hint
