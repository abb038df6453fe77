"""What the backends of exported encoders share: their protocol, and the checks of what a graph takes and gives.

Running a graph is in `vision.backends.onnx` and `vision.backends.om`.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import EncoderCard
from llama_adapter.runtime.graphs.ports import Port
from llama_adapter.vision.backends.base import VisionBackend

FLOATS: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}


class ExportedBackend(VisionBackend, Protocol):
    """A vision backend whose weights are in an exported file."""

    @property
    def card(self) -> EncoderCard | None:
        """What the file says of itself; None when it comes from elsewhere and says nothing."""
        ...

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """The batch sizes that the graph was compiled for, ascending; None where it takes any."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """An encoder's graph as the runtime that loaded it describes it, found to be one that pictures can be given to."""

    file: str
    image_size: int
    dtype: np.dtype[Any]  # of the pixels: float32 or float16
    batch: int | None  # None where it is open
    output_dtype: np.dtype[Any]
    output_shape: tuple[int, int]  # (Q, D); -1 where the graph does not tell

    def to_input(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """Pixels uint8 -> the graph's type, contiguous in C order; 0..255 is exact in either."""
        return np.ascontiguousarray(pixels_BHWC, dtype=self.dtype)

    def check_pixels(self, pixels_BHWC: np.ndarray) -> None:
        """Raise GraphError unless these are one or more pictures as the graph takes them."""
        given, side = pixels_BHWC.shape, self.image_size
        if pixels_BHWC.dtype != np.uint8 or len(given) != 4 or given[1:] != (side, side, 3) or not given[0]:
            raise GraphError(
                f"`{self.file}` encodes pictures of uint8 (B, {side}, {side}, 3) with B at least 1, "
                f"and was given {Port(name='', dtype=str(pixels_BHWC.dtype), shape=given)}",
                hint="resize and crop with `vision.preprocess.preprocess`; height, width, colour in this order",
            )

    def check_output(self, output: np.ndarray, *, batch: int) -> None:
        """Raise GraphError unless this is the visual query (batch, Q, D) that the graph promised."""
        wanted = (batch, *self.output_shape)
        fits = len(output.shape) == 3 and all(
            want in (-1, have) for want, have in zip(wanted, output.shape, strict=True)
        )
        if not fits or output.dtype != self.output_dtype:
            raise GraphError(
                f"`{self.file}` promises {Port(name='', dtype=str(self.output_dtype), shape=wanted)} for {batch} "
                f"pictures, and gave {Port(name='', dtype=str(output.dtype), shape=output.shape)}",
                hint="the file, or the runtime under it, is damaged: export the encoder again",
            )


def read_signature(
    inputs: Sequence[Port], outputs: Sequence[Port], *, file: str, card: EncoderCard | None, hint: str
) -> Signature:
    """The graph as a `Signature`; raises GraphError, with `hint`, when it is not that of a picture encoder.

    The types are the graph's own, since conversion may change them; the sizes must be those of its card.
    """
    pixels = _only(inputs, "input", file=file, hint=hint)
    side = _picture_side(pixels, file=file, hint=hint)
    if pixels.dtype not in FLOATS:
        advice = "; preprocessing compiled into the file (AIPP) is not used here" if pixels.dtype == "uint8" else ""
        raise GraphError(
            f"`{file}` takes pixels of {pixels.dtype}, and an encoder is wanted that takes float32 or float16",
            hint=hint + advice,
        )
    query = _only(outputs, "output", file=file, hint=hint)
    if len(query.shape) != 3 or query.dtype not in FLOATS:
        raise GraphError(
            f"`{file}` gives {query}, and a visual query of float32 or float16 (B, Q, D) is wanted", hint=hint
        )
    _check_batch(pixels, file=file, hint=hint)
    signature = Signature(
        file=file,
        image_size=side,
        dtype=FLOATS[pixels.dtype],
        batch=None if pixels.shape[0] < 0 else pixels.shape[0],
        output_dtype=FLOATS[query.dtype],
        output_shape=(query.shape[1], query.shape[2]),
    )
    if card is not None:
        _check_card(signature, card)
    return signature


def check_owner(process: int, *, file: str) -> None:
    """Raise GraphError unless this is the process that opened the encoder: threads and replies are its own."""
    if os.getpid() != process:
        raise GraphError(
            f"`{file}` was opened by the process that this one was forked from",
            hint="open the encoder in each process that uses it",
        )


def to_tensor(output: np.ndarray) -> Tensor:
    """A result of a runtime as a tensor on the CPU."""
    return torch.from_numpy(output if output.flags.writeable else output.copy())


def _only(ports: Sequence[Port], kind: str, *, file: str, hint: str) -> Port:
    if len(ports) != 1:
        names = ", ".join(f"{port.name} {port}" for port in ports)
        raise GraphError(f"`{file}` has {len(ports)} {kind}s, and one is wanted: {names}", hint=hint)
    return ports[0]


def _picture_side(port: Port, *, file: str, hint: str) -> int:
    shape = port.shape
    if len(shape) == 4 and shape[3] == 3 and shape[1] == shape[2] > 0:
        return shape[1]
    layout = ""
    if len(shape) == 4 and shape[1] == 3:
        # The same number of bytes: a runtime that counts bytes only would run it, and the answer would be noise.
        layout = ": colour stands before height and width (NCHW), so pixels would be read in the wrong order"
    raise GraphError(f"`{file}` takes {port}, and pictures are given as (B, S, S, 3){layout}", hint=hint)


def _check_batch(port: Port, *, file: str, hint: str) -> None:
    """Raise GraphError for a fixed batch of nothing, and of more than this machine could hold."""
    batch = port.shape[0]
    if not batch:
        raise GraphError(f"`{file}` takes {port}, which is no picture at all", hint=hint)
    num_bytes = math.prod(port.shape) * (1 + FLOATS[port.dtype].itemsize)  # of the pixels, and of them in its own type
    if batch > 0 and num_bytes > _memory_bytes():
        raise GraphError(
            f"`{file}` was compiled for {batch:,} pictures at once, whose pixels alone take {num_bytes / 1e9:,.1f} GB "
            f"of the {_memory_bytes() / 1e9:,.1f} GB here",
            hint=f"make it again for a smaller batch: {hint}",
        )


def _memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_card(signature: Signature, card: EncoderCard) -> None:
    side, query = signature.image_size, signature.output_shape
    differs = any(have not in (-1, want) for have, want in zip(query, card.output_shape, strict=True))
    if side != card.input_shape[0] or differs:
        raise GraphError(
            f"`{signature.file}` says that it makes {card.output_shape} of pictures of {card.input_shape[0]} pixels, "
            f"and its graph makes {query} of {side} pixels",
            hint="the file was changed after its export: export the encoder again",
        )
