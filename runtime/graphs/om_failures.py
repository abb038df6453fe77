"""Explains failures of ais_bench: its own words are an error code of ACL, and what it prints on stdout."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.explanation import Explanation, first_that_fits
from llama_adapter.runtime.graphs.toolkit import SET_ENV

# Return codes of ACL by what they say about a failure. Numbers and names are from CANN's public headers: acl_base.h,
# rt_error_codes.h (8.5), ge_error_codes.h.
CodeKind = Literal["memory", "device", "context", "parameter", "file", "batch", "execution"]

_BY_KIND: Final[Mapping[CodeKind, Mapping[int, str]]] = {
    "memory": {
        200000: "ACL_ERROR_BAD_ALLOC",
        207001: "ACL_ERROR_RT_MEMORY_ALLOCATION",
        207018: "ACL_ERROR_RT_DEVICE_OOM",
        245000: "ACL_ERROR_GE_MEMORY_ALLOCATION",
    },
    "device": {
        107001: "ACL_ERROR_RT_INVALID_DEVICEID",
        200002: "ACL_ERROR_INVALID_DEVICE",
        207004: "ACL_ERROR_RT_NO_DEVICE",
        207006: "ACL_ERROR_RT_NO_PERMISSION",
        507033: "ACL_ERROR_RT_DEV_SETUP_ERROR",
        507899: "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
    },
    "context": {
        107002: "ACL_ERROR_RT_CONTEXT_NULL",
        107003: "ACL_ERROR_RT_STREAM_CONTEXT",
    },
    "parameter": {
        100000: "ACL_ERROR_INVALID_PARAM",
        107000: "ACL_ERROR_RT_PARAM_INVALID",
        145000: "ACL_ERROR_GE_PARAM_INVALID",
    },
    "file": {
        100003: "ACL_ERROR_INVALID_FILE",
        100012: "ACL_ERROR_DESERIALIZE_MODEL",
        100013: "ACL_ERROR_PARSE_MODEL",
        100014: "ACL_ERROR_READ_MODEL_FAILURE",
        100015: "ACL_ERROR_MODEL_SIZE_INVALID",
        100016: "ACL_ERROR_MODEL_MISSING_ATTR",
        507008: "ACL_ERROR_RT_SOC_VERSION",
        545001: "ACL_ERROR_GE_LOAD_MODEL",
    },
    "batch": {
        145013: "ACL_ERROR_GE_DYNAMIC_BATCH_SIZE_INVALID",
    },
    "execution": {
        507000: "ACL_ERROR_RT_INTERNAL_ERROR",
        507010: "ACL_ERROR_RT_LOST_HEARTBEAT",
        507011: "ACL_ERROR_RT_MODEL_EXECUTE",
        507014: "ACL_ERROR_RT_AICORE_TIMEOUT",
        507015: "ACL_ERROR_RT_AICORE_EXCEPTION",
        507017: "ACL_ERROR_RT_AICPU_TIMEOUT",
        507018: "ACL_ERROR_RT_AICPU_EXCEPTION",
        507034: "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT",
        507035: "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
        507046: "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT",
        507054: "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR",
    },
}
KINDS: Final[Mapping[int, CodeKind]] = {code: kind for kind, codes in _BY_KIND.items() for code in codes}
NAMES: Final[Mapping[int, str]] = {code: name for codes in _BY_KIND.values() for code, name in codes.items()}
# A code stands in brackets or behind a word for it; other numbers of six digits are sizes.
_CODE: Final = re.compile(r"(?:\[|\b(?:ret|code|result|failed)\b(?: is| code)?\W{0,2})(\d{6})\b", re.IGNORECASE)

_INSTALL = (
    "neither part is on PyPI; build both for this Python and this CANN: "
    "git clone https://gitee.com/ascend/tools.git, then pip install ./backend . in "
    "tools/ais-bench_workload/tool/ais_bench, with CANN's set_env.sh sourced"
)

# What ais_bench imports beside its own parts, and the package that has it.
_NEEDED: Final[Mapping[str, str]] = {"attr": "attrs", "numpy": "numpy", "tqdm": "tqdm"}

# Sentences and hints may name {device}. The patterns are words of ais_bench and aclruntime; a code comes first.
_DEVICE: Final = Explanation(
    r"acl open device|acl init failed|get all devices count",
    "the device {device} cannot be opened",
    "`npu-smi info` lists the devices; one may be hidden (ASCEND_RT_VISIBLE_DEVICES), not passed into the "
    "container (/dev/davinci*), or closed to this user (group HwHiAiUser); choose another with "
    "`--encoder-device N`, or with `--device npu:N` for the language model too",
)
_MEMORY: Final = Explanation(
    r"EL0004|malloc failed|allocate memory|out of memory",
    "the memory of device {device} is not enough",
    "`npu-smi info` shows what uses it; export with smaller batch sizes, or leave the language model less room",
)
_FILE: Final = Explanation(
    r"ACL: invalid parameter|load model from file failed",
    "it is damaged, was made for another chip than the one of device {device}, or by a newer CANN",
    "compare the chip that `npu-smi info` names with the one it was made for, and make it again with "
    "`llama-adapter export om --soc-version <chip>`; memory that is short on the device looks the same",
)
_BATCH: Final = Explanation(
    r"dymBatch parameter|dynamic_batch_size parameter|not a dymbatch model",
    "the batch size is not one it was compiled for, so its side-car lists others than the file has",
    "make the OM again with `llama-adapter export om`",
)
_CONTEXT: Final = Explanation(
    r"set current context failed",
    "its context on the device is gone: something reset the device in this process",
    "run the encoder in a process of its own: `--encoder-process`",
)
_PARAMETER: Final = Explanation(
    r"(?!)",  # by its codes only
    "ACL refused a value that ais_bench gave it",
    "ais_bench may be built for another CANN: build it again with this one; ~/ascend/log says which value",
)
_EXECUTION: Final = Explanation(
    r"",
    "it failed on device {device}",
    "`npu-smi info` shows the device's health, ~/ascend/log its messages (more of it with ASCEND_GLOBAL_LOG_LEVEL=1)",
)
BY_CODE: Final[Mapping[CodeKind, Explanation]] = {
    "memory": _MEMORY,
    "device": _DEVICE,
    "context": _CONTEXT,
    "parameter": _PARAMETER,
    "file": _FILE,
    "batch": _BATCH,
    "execution": _EXECUTION,
}
OPENING: Final = (_DEVICE, _MEMORY, _FILE)
RUNNING: Final = (_MEMORY, _BATCH, _CONTEXT, _EXECUTION)


def opening_failed(error: Exception, *, said: str, file: str, soc: str, device: int) -> GraphError:
    """For an InferSession that cannot be made; `said` is what it printed."""
    return _explain(OPENING, error, said, start=f"ais_bench cannot load `{file}`{_made_for(soc)}", device=device)


def running_failed(
    error: Exception, *, said: str, file: str, soc: str, device: int, wanted: str, given: str
) -> GraphError:
    """For `infer`; `wanted` and `given` are types, shapes and bytes."""
    start = f"ais_bench cannot run `{file}`{_made_for(soc)}, which takes {wanted} and was given {given}"
    return _explain(RUNNING, error, said, start=start, device=device)


def import_failed(error: Exception, *, said: str = "") -> GraphError:
    """For `import ais_bench.infer.interface`; `said` is what it printed."""
    explained = _import_failed(error)
    return GraphError(f"{explained.message}. It said: {said}", hint=explained.hint) if said else explained


def _import_failed(error: Exception) -> GraphError:
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing == "ais_bench":
        return GraphError("Running an OM file needs ais_bench, which is not installed", hint=_INSTALL)
    if missing == "aclruntime":
        return GraphError(
            "ais_bench is installed and its other part, aclruntime, is not (or is for another Python)", hint=_INSTALL
        )
    if missing.startswith("ais_bench."):
        return GraphError(
            f"There is a package named ais_bench, and it is not Ascend's: it has no `{missing}`",
            hint="the package ais-bench-benchmark, which tests language models, takes the same name: uninstall it, or "
            f"use another environment; for Ascend's {_INSTALL}",
        )
    if missing in _NEEDED:
        return GraphError(f"ais_bench needs the package {missing}", hint=f"pip install {_NEEDED[missing]}")
    if missing:
        return GraphError(
            f"ais_bench is installed and cannot be imported: it finds no module {missing}",
            hint="the installation of ais_bench is incomplete: docs/ascend.md",
        )
    if re.search(r"\blib\w+\.so", str(error)):
        return GraphError(
            f"ais_bench is installed and CANN's libraries are not found: {_words(error)}",
            hint=f"{SET_ENV}, then start again in the same shell; "
            "without CANN on this machine, use `--vision onnx` or `--vision torch`",
        )
    return GraphError(
        f"ais_bench is installed and cannot be imported: {type(error).__name__}: {_words(error)}",
        hint=f"build it again for this Python and this CANN: {_INSTALL}",
    )


def _explain(table: Iterable[Explanation], error: Exception, said: str, *, start: str, device: int) -> GraphError:
    """By ACL's own code where one was given, else by the words of the libraries above it."""
    words = " | ".join(part for part in (_words(error), said) if part)
    code = find_code(words)
    if code is not None:
        meaning, told = BY_CODE[KINDS[code]], f" ({code} is {NAMES[code]})"
    elif found := first_that_fits(table, words):
        meaning, told = found[0], ""
    else:
        return GraphError(f"{start}. It said: {words}", hint="`llama-adapter doctor` looks at what is installed")
    return GraphError(f"{start}: {meaning.sentence.format(device=device)}. It said: {words}{told}", hint=meaning.hint)


def _made_for(soc: str) -> str:
    return f" (made for {soc})" if soc else ""


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def find_code(words: str) -> int | None:
    """The first code of the table in an error's words; None without one."""
    return next((code for code in map(int, _CODE.findall(words)) if code in KINDS), None)
