"""Explains failures of ais_bench, which reports a return code of ACL and prints the reason on stdout."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from llama_adapter.runtime.device_failures import ABSENT, CODES, CONTEXT, MEMORY
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.explanation import Explanation, first_that_fits, read_explanations
from llama_adapter.runtime.graphs.toolkit import SET_ENV

_INSTALL = (
    "neither part is on PyPI; build both for this Python and this CANN: "
    "git clone https://gitee.com/ascend/tools.git, then pip install ./backend . in "
    "tools/ais-bench_workload/tool/ais_bench, with CANN's set_env.sh sourced"
)

_MEANINGS: Final[Mapping[str, Explanation]] = read_explanations("om")
_OPENING: Final = ("device", "memory", "file")
_RUNNING: Final = ("memory", "batch", "context", "execution")

# The codes of CANN's runtime, and those of ACL and of the graph engine, which occur only in OM sessions (acl_base.h,
# rt_error_codes.h, ge_error_codes.h of CANN 8.5).
_OF_THE_RUNTIME: Final = {MEMORY: "memory", ABSENT: "device", CONTEXT: "context"}
BY_CODE: Final[Mapping[int, str]] = {
    **{code: _OF_THE_RUNTIME.get(failure, "execution") for code, failure in CODES.items()},
    **dict.fromkeys((507000, 507011), "execution"),
    **dict.fromkeys((100000, 107000, 145000), "parameter"),
    **dict.fromkeys((100003, 100012, 100013, 100014, 100015, 100016, 507008, 545001), "file"),
    145013: "batch",
    245000: "memory",
}
# A code is in brackets or follows a word such as `ret` or `code`. Other numbers of six digits are sizes.
_CODE: Final = re.compile(r"(?:\[|\b(?:ret|code|result|failed)\b(?: is| code)?\W{0,2})(\d{6})\b", re.IGNORECASE)


def opening_failed(error: Exception, *, said: str, file: str, soc: str, device: int) -> GraphError:
    """The error for an InferSession that failed to open. `said` is what it printed."""
    return _explain(_OPENING, error, said, start=f"ais_bench cannot load `{file}`{_made_for(soc)}", device=device)


def running_failed(
    error: Exception, *, said: str, file: str, soc: str, device: int, wanted: str, given: str
) -> GraphError:
    """The error for a failed `infer`. `wanted` and `given` describe types, shapes and bytes."""
    start = f"ais_bench cannot run `{file}`{_made_for(soc)}, which takes {wanted} and was given {given}"
    return _explain(_RUNNING, error, said, start=start, device=device)


def import_failed(error: Exception, *, said: str = "") -> GraphError:
    """The error for a failed `import ais_bench.infer.interface`. `said` is what it printed."""
    message, hint = _explain_import(error)
    return GraphError(f"{message}. It said: {said}" if said else message, hint=hint)


def _explain_import(error: Exception) -> tuple[str, str]:
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing == "ais_bench":
        return "Running an OM file needs ais_bench, which is not installed", _INSTALL
    if missing == "aclruntime":
        return "ais_bench is installed and its other part, aclruntime, is not (or is for another Python)", _INSTALL
    if missing.startswith("ais_bench."):
        return (
            f"There is a package named ais_bench, and it is not Ascend's: it has no `{missing}`",
            "the package ais-bench-benchmark, which tests language models, takes the same name: uninstall it, or use "
            f"another environment; for Ascend's {_INSTALL}",
        )
    if re.search(r"\blib\w+\.so", str(error)):
        return (
            f"ais_bench is installed and CANN's libraries are not found: {_words(error)}",
            f"{SET_ENV}, then start again in the same shell; without CANN on this machine, use `--vision onnx` or "
            "`--vision torch`",
        )
    return (
        f"ais_bench is installed and cannot be imported: {type(error).__name__}: {_words(error)}",
        f"`pip install attrs numpy tqdm`, which it needs, or build it again for this Python and this CANN: {_INSTALL}",
    )


def _explain(names: Iterable[str], error: Exception, said: str, *, start: str, device: int) -> GraphError:
    """Explain the error by ACL's code if it is known, else by the messages of ais_bench and aclruntime."""
    words = " | ".join(part for part in (_words(error), said) if part)
    if (code := find_code(words)) is not None:
        meaning = _MEANINGS[BY_CODE[code]]
    elif found := first_that_fits(map(_MEANINGS.__getitem__, names), words):
        meaning = found[0]
    else:
        return GraphError(f"{start}. It said: {words}", hint="`llama-adapter doctor` looks at what is installed")
    return GraphError(f"{start}: {meaning.sentence.format(device=device)}. It said: {words}", hint=meaning.hint)


def _made_for(soc: str) -> str:
    return f" (made for {soc})" if soc else ""


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def find_code(words: str) -> int | None:
    """The first known code in an error's text; None if there is none."""
    return next((code for code in map(int, _CODE.findall(words)) if code in BY_CODE), None)
