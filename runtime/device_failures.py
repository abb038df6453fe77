"""Explains errors that torch and torch_npu raise while a device computes, by their text. Imports no torch.

CANN's error codes are in a table. runtime/devices/npu_load.py explains errors of importing torch_npu.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# torch has no exception class for these failures: of the CPU's allocator, of mapping a file, of a library's workspace,
# of the driver's allocations, and of oneDNN, whose message lacks the reason why a primitive could not be made.
_SHORTAGES = (
    "can't allocate memory",
    "Cannot allocate memory",
    "_STATUS_ALLOC_FAILED",  # after CUBLAS or CUDNN
    "_ALLOCATION_FAILED",  # of cuDNN 9
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
_SHORTAGES_OF_ONEDNN = ("could not create a primitive", "could not create a memory object")  # the whole text


def tells_shortage(text: str) -> bool:
    """Whether an error's text says that an allocation failed."""
    return any(words in text for words in _SHORTAGES) or text.strip() in _SHORTAGES_OF_ONEDNN


def is_failed_device(text: str) -> bool:
    """Whether an error's text says that a device failed while it computed, not that a program cannot be compiled.

    The errors of CUDA that a capture causes name it, for example "operation not permitted when stream is capturing".
    """
    return explain_device_error(text) is not None or ("CUDA error: " in text and "captur" not in text)


LOOK = "`npu-smi info` shows the device's health and its processes, and the newest log under ~/ascend/log its messages"


@dataclass(frozen=True, kw_only=True, slots=True)
class NpuFailure:
    """A kind of failure. `is_memory` is True if a smaller batch helps."""

    sentence: str
    hint: str
    is_memory: bool = False


MEMORY = NpuFailure(
    sentence="the memory of the NPU is not enough",
    hint="try a smaller --batch-size; `npu-smi info` shows who else uses the memory",
    is_memory=True,
)
CONTEXT = NpuFailure(
    sentence="the thread's context on the NPU is gone, or belongs to another library",
    hint="with an OM encoder, pass --encoder-process: ais_bench and torch_npu then no longer share a process",
)
ABSENT = NpuFailure(
    sentence="the NPU does not exist, or this user may not open it",
    hint="`npu-smi info` lists the devices; look at ASCEND_RT_VISIBLE_DEVICES, at the devices that a container was "
    "given, and at the group of /dev/davinci* (usually HwHiAiUser)",
)
OPERATOR = NpuFailure(
    sentence="an operator failed on the NPU",
    hint="try `--operators aten` and `--mode eager`; with ASCEND_LAUNCH_BLOCKING=1 --debug shows which operator it "
    f"was; {LOOK}",
)
REFUSED = NpuFailure(
    sentence="an operator of CANN refused its arguments, or does not exist for this chip",
    hint="try `--operators aten`; since CANN 8.5 the package of operators for the chip is installed apart; the log "
    "under ~/ascend/log names the operator",
)
LATE = NpuFailure(sentence="the NPU did not finish in time", hint=f"try again, with the device to yourself; {LOOK}")
GRAPH = NpuFailure(sentence="the graph of a decode step could not be captured or replayed", hint="pass `--mode eager`")
BROKEN = NpuFailure(
    sentence="the NPU or its driver has failed",
    hint=f"{LOOK}; if the device does not recover, reset it or restart the machine",
)
OTHER = NpuFailure(sentence="the NPU failed", hint=f"{LOOK}; try `--operators aten` and `--mode eager`")

# acl/error_codes/rt_error_codes.h and acl/acl_base_rt.h of torch_npu 2.13; codes from 161001 on are those of single
# operators (`aclnn` status codes in CANN's documentation). Any other code counts as OTHER.
CODES: Mapping[int, NpuFailure] = {
    **dict.fromkeys((200000, 207001, 207018), MEMORY),
    **dict.fromkeys((107002, 107003), CONTEXT),
    **dict.fromkeys((107001, 200002, 207004, 207006, 507033), ABSENT),
    **dict.fromkeys((507015, 507016, 507018, 507035, 507036, *range(507042, 507046), 507049, 507050), OPERATOR),
    **dict.fromkeys((161001, 161002, 207000, 361001, *range(561000, 561200)), REFUSED),
    **dict.fromkeys((107019, 107020, 207020, 507012, 507014, 507017, 507034, 507046, 507047, 507048), LATE),
    **dict.fromkeys((*range(107024, 107033), 107036, 107038, 107040, 107041, 107046, 507903), GRAPH),
    **dict.fromkeys((507001, 507010, 507013, 507051, 507052, 507053, 507054, 507055, 507899, 507901), BROKEN),
}

# The form of torch_npu 2.13 (csrc/core/npu/NPUException.h, utils/_error_code.py): `NPU function error: ..., error code
# is 507015`, `ACL stream synchronize failed, error code:507018`, usually followed by `[ERROR] <time> (PID:1, Device:0,
# RankID:-1) ERR00100 PTA call acl api failed`.
_SIGN = re.compile(
    r"\bERR\d{5}\b|\bNPU (?:function )?error\b|\bACL stream synchronize failed|\bcall aclnn\w+ failed"
    r"|\bNPU out of memory"
)
_CODE = re.compile(r"error code(?: is)?\s*:?\s*(\d{6})\b")
_OWN_MEMORY = re.compile(r"\bNPU out of memory|\bEL0004\b")
_OWN_MESSAGE = re.compile(r"^.*\bE[A-Z0-9]\d{4}\b.*$", re.MULTILINE)  # CANN's message, such as EZ9999: Inner Error!


def explain_device_error(text: str) -> NpuFailure | None:
    """The failure that the text of an error means; None if the text is not from torch_npu."""
    if _SIGN.search(text) is None:
        return None
    if _OWN_MEMORY.search(text):
        return MEMORY
    codes = [int(code) for code in _CODE.findall(text)]
    return next((CODES[code] for code in codes if code in CODES), OTHER)


def shorten_device_error(text: str, *, limit: int = 300) -> str:
    """The first line of `text` and the first message of CANN in it, each cut to `limit` characters."""
    first, _, rest = text.strip().partition("\n")
    own = _OWN_MESSAGE.search(rest)
    return " / ".join(" ".join(line.split())[:limit] for line in (first, own[0] if own else "") if line)
