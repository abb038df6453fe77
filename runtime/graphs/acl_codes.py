"""Return codes of ACL, the runtime under OM files, by what they say about a failure; what to do is told elsewhere.

Numbers and names are those of CANN's public headers: acl_base.h, rt_error_codes.h (8.5), ge_error_codes.h.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

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


def find_code(words: str) -> int | None:
    """The first code of the table in an error's words; None without one."""
    return next((code for code in map(int, _CODE.findall(words)) if code in KINDS), None)
