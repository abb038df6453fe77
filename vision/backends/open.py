"""From a spec to a running encoder: the one place that knows which backend runs which file."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from llama_adapter.vision.backends.exported import ExportedBackend
from llama_adapter.vision.backends.om import OmVisionBackend
from llama_adapter.vision.backends.onnx import OnnxVisionBackend
from llama_adapter.vision.backends.process import ProcessVisionBackend

EncoderKind = Literal["onnx", "om"]

__all__ = ["EncoderKind", "EncoderSpec", "ExportedBackend", "open_encoder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec:
    """Which exported encoder to run, and how. Plain values: it can be pickled and printed."""

    kind: EncoderKind
    path: str  # a file; for om also a folder with files of several batch sizes
    device_id: int = 0  # for om, as ASCEND_RT_VISIBLE_DEVICES numbers them
    threads: int | None = None  # for onnx; None takes torch's number
    own_process: bool = False  # apart from the language model, with its own memory and its own runtime

    def __post_init__(self) -> None:
        if self.kind not in get_args(EncoderKind):
            raise ValueError(f"kind must be onnx or om, got {self.kind!r}")
        if not self.path:
            raise ValueError("path is empty: name the encoder's file")
        if type(self.device_id) is not int or not 0 <= self.device_id <= 255:
            raise ValueError(f"device_id must be a whole number from 0 to 255, got {self.device_id!r}")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ValueError(f"threads must be a whole number of at least 1, got {self.threads!r}")


_OPENERS: Mapping[str, Callable[[EncoderSpec], ExportedBackend]] = {
    "onnx": lambda spec: OnnxVisionBackend(spec.path, threads=spec.threads),
    "om": lambda spec: OmVisionBackend(spec.path, device_id=spec.device_id),
}


def open_encoder(spec: EncoderSpec) -> ExportedBackend:
    """The backend of `spec`, loaded and checked, not warmed up. Raises GraphError when it cannot be had."""
    if spec.own_process:
        # A fresh process would take another number of threads than this one was told to.
        here = dataclasses.replace(spec, own_process=False, threads=spec.threads or torch.get_num_threads())
        return ProcessVisionBackend(functools.partial(open_encoder, here), file=spec.path)
    return _OPENERS[spec.kind](spec)
