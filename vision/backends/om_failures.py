"""What ais_bench's failures mean and what to do about them, in words. Its own are a code; the rest is on its stdout."""

import re
from dataclasses import dataclass

from vision.errors import EncoderError

_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_INSTALL = (
    "neither part is on PyPI; build both for this Python and this CANN: "
    "git clone https://gitee.com/ascend/tools.git, then pip install ./backend . in "
    "tools/ais-bench_workload/tool/ais_bench, with CANN's set_env.sh sourced"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """What a failure with `pattern` in its words says, and what to do; both know {device} and {soc}."""

    pattern: re.Pattern[str]
    sentence: str
    hint: str


_DEVICE = Meaning(
    pattern=re.compile(r"\[507\d{3}\]|\[107001\]|acl open device|acl init failed|get all devices count"),
    sentence="the device {device} cannot be opened",
    hint="`npu-smi info` lists the devices; one may be hidden (ASCEND_RT_VISIBLE_DEVICES), not passed into the "
    "container (/dev/davinci*), or closed to this user (group HwHiAiUser); choose another with the encoder's device id",
)
_MEMORY = Meaning(
    pattern=re.compile(r"\[[12]0(?:7001|0000)\]|EL0004|malloc failed|allocate memory|out of memory", re.IGNORECASE),
    sentence="the memory of device {device} is not enough",
    hint="`npu-smi info` shows who uses it; export with smaller batch sizes, or leave the language model less room",
)
OPENING = (
    _DEVICE,
    _MEMORY,
    Meaning(
        pattern=re.compile(r"ACL: invalid parameter|load model from file failed"),
        sentence="it is damaged, was made for another chip than the one of device {device}, or by a newer CANN",
        hint="compare the chip that `npu-smi info` names with the one it was made for, and make it again with "
        "`llama-adapter export om --soc-version <chip>`; memory that is short on the device looks the same",
    ),
)
RUNNING = (
    _MEMORY,
    Meaning(
        pattern=re.compile(r"dymBatch parameter|dynamic_batch_size parameter|not a dymbatch model"),
        sentence="the batch size is none that it was compiled for, so its side-car lists others than the file has",
        hint="make the OM again with `llama-adapter export om`",
    ),
    Meaning(
        pattern=re.compile(r"\[10700[023]\]|set current context failed"),
        sentence="its context on the device is gone: something reset the device in this process",
        hint="run the encoder in a process of its own",
    ),
    Meaning(
        pattern=re.compile(r""),
        sentence="it failed on device {device}",
        hint="`npu-smi info` shows whether the device is well, ~/ascend/log what it said "
        "(more of it with ASCEND_GLOBAL_LOG_LEVEL=1)",
    ),
)


def opening_failed(error: Exception, *, said: str, file: str, soc: str, device: int) -> EncoderError:
    """For an InferSession that cannot be made; `said` is what it printed."""
    return _explain(OPENING, error, said, start=f"ais_bench cannot load `{file}`{_made_for(soc)}", device=device)


def running_failed(
    error: Exception, *, said: str, file: str, soc: str, device: int, wanted: str, given: str
) -> EncoderError:
    """For `infer`; `wanted` and `given` are types, shapes and bytes."""
    start = f"ais_bench cannot run `{file}`{_made_for(soc)}, which takes {wanted} and was given {given}"
    return _explain(RUNNING, error, said, start=start, device=device)


def import_failed(error: Exception) -> EncoderError:
    """For `import ais_bench.infer.interface`."""
    missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if missing == "ais_bench":
        return EncoderError("Running an OM file needs ais_bench, which is not installed", hint=_INSTALL)
    if missing == "aclruntime":
        return EncoderError(
            "ais_bench is installed and its other part, aclruntime, is not (or is for another Python)", hint=_INSTALL
        )
    if missing.startswith("ais_bench."):
        return EncoderError(
            f"There is a package named ais_bench, and it is not Ascend's: it has no `{missing}`",
            hint="the package ais-bench-benchmark, which tests language models, takes the same name: uninstall it, or "
            f"use another environment; for Ascend's {_INSTALL}",
        )
    if missing:
        return EncoderError(f"ais_bench needs the package {missing}", hint=f"pip install {missing}")
    if re.search(r"\blib\w+\.so", str(error)):
        return EncoderError(
            f"ais_bench is installed and CANN's libraries are not found: {_words(error)}",
            hint=f"{_SET_ENV} (in current CANN: cann/set_env.sh), then start again in the same shell; "
            "without CANN on this machine, use `--vision onnx` or `--vision torch`",
        )
    return EncoderError(
        f"ais_bench is installed and cannot be imported: {type(error).__name__}: {_words(error)}",
        hint=f"build it again for this Python and this CANN: {_INSTALL}",
    )


def _explain(meanings: tuple[Meaning, ...], error: Exception, said: str, *, start: str, device: int) -> EncoderError:
    words = " | ".join(part for part in (_words(error), said) if part)
    for meaning in meanings:
        if meaning.pattern.search(words):
            sentence = f"{start}: {meaning.sentence.format(device=device)}. It said: {words}"
            return EncoderError(sentence, hint=meaning.hint)
    return EncoderError(f"{start}. It said: {words}", hint="`llama-adapter doctor` looks at what is installed")


def _made_for(soc: str) -> str:
    return f" (made for {soc})" if soc else ""


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
