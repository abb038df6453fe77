"""Performance targets on CPUs: ratios of the medians of two engines."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scripts.peers.results import Results, Row
from scripts.peers.sizes import ENCODERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One of our engines must reach at least `wanted` times the best of `peers`, in one figure."""

    part: str
    ours: str
    peers: tuple[str, ...]
    size: str
    batch: int
    wanted: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """A target and the measured rows; `ratio` is None if a figure is missing."""

    target: Target
    ours: Row | None
    peer: Row | None  # the best of the target's peers

    @property
    def ratio(self) -> float | None:
        """The median of ours divided by the peer's median."""
        if self.ours is None or self.peer is None:
            return None
        return self.ours.median / self.peer.median

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None if it was not measured."""
        return None if self.ratio is None else self.ratio >= self.target.wanted

    @property
    def is_interleaved(self) -> bool:
        """Whether both rows were measured alternately, in one run."""
        return self.ours is not None and self.peer is not None and self.ours.run == self.peer.run


LLAMA_CPP = ("llama.cpp-bf16", "llama.cpp-q8_0", "llama.cpp-q4_0")
_AT_EQUAL_BITS = tuple(zip(("ours-bfloat16", "ours-int8", "ours-int4"), LLAMA_CPP, strict=True))
BATCH_SIZES = (1, 5, 16)
PREFILL_BATCH_SIZES = (1, 5)


def _targets(
    part: str, ours: str, peers: tuple[str, ...], sizes: Sequence[str], wanted: Mapping[int, float]
) -> Iterator[Target]:
    """A target for each size and batch size; `wanted` is the ratio by batch size."""
    for size, (batch, ratio) in itertools.product(sizes, wanted.items()):
        yield Target(part=part, ours=ours, peers=peers, size=size, batch=batch, wanted=ratio)


def _all(ratio: float, batches: Sequence[int] = BATCH_SIZES) -> dict[int, float]:
    return dict.fromkeys(batches, ratio)


_BOTH = ("1B", "160M")
_TOWERS = ENCODERS[1:]
_JOBS = [f"{decoder}+{encoder}" for decoder in _BOTH for encoder in ("embedded", "ViT-L/14")]
TARGETS: tuple[Target, ...] = (
    *_targets("decode", "ours-float32", ("hf-float32",), ("1B",), _all(1.8)),
    *_targets("prefill", "ours-float32", ("hf-float32",), ("1B",), _all(1.8, PREFILL_BATCH_SIZES)),
    *_targets("decode", "ours-float32", ("hf-float32",), ("160M",), _all(1.8)),
    *_targets("prefill", "ours-float32", ("hf-float32",), ("160M",), _all(1.8, PREFILL_BATCH_SIZES)),
    *_targets("decode", "ours-bfloat16", ("llama.cpp-bf16",), ("1B",), _all(1.0)),
    *_targets("prefill", "ours-bfloat16", ("llama.cpp-bf16",), ("1B",), _all(1.3, PREFILL_BATCH_SIZES)),
    *_targets("decode", "ours-bfloat16", ("llama.cpp-bf16",), ("160M",), _all(0.9)),
    *_targets("prefill", "ours-bfloat16", ("llama.cpp-bf16",), ("160M",), _all(1.3, PREFILL_BATCH_SIZES)),
    *_targets("decode", "ours-int8", ("llama.cpp-q8_0",), ("1B",), {1: 1.2, 5: 3.0, 16: 2.5}),
    *_targets("decode", "ours-int8", LLAMA_CPP, ("1B",), _all(1.2, (5, 16))),
    *_targets("decode", "ours-int8", ("llama.cpp-q8_0",), ("160M",), {1: 0.9}),
    *_targets("prefill", "ours-int8", ("llama.cpp-q8_0",), _BOTH, _all(3.0, PREFILL_BATCH_SIZES)),
    *_targets("decode", "ours-int4", ("llama.cpp-q4_0",), ("1B",), {1: 1.15, 5: 2.0, 16: 2.0}),
    *_targets("prefill", "ours-int4", ("llama.cpp-q4_0",), ("1B",), _all(3.0, PREFILL_BATCH_SIZES)),
    *_targets("decode", "ours-int4", ("ours-int8",), ("1B",), {1: 1.4, 5: 1.2, 16: 1.0}),
    *_targets("job", "ours-float32", ("reference-float32",), _JOBS, {5: 4.0}),
    *_targets("vision", "ours-float32", ("onnxruntime-float32", "openvino-float32"), _TOWERS, _all(1.0)),
    *_targets("vision", "ours-int8", ("hf-float32",), ("ViT-L/14",), _all(5.0)),
    *_targets("vision", "ours-int8", ("openvino-int8",), ("ViT-L/14",), _all(1.0)),
    *_targets("vision", "ours-int8", ("onnxruntime-int8", "openvino-int8"), _TOWERS[1:], _all(1.0)),
    *(
        target
        for ours, peer in _AT_EQUAL_BITS
        for part, wanted in (("decode", {1: 1.1, 5: 1.5, 16: 2.0}), ("prefill", _all(2.0, PREFILL_BATCH_SIZES)))
        for target in _targets(part, ours, (peer,), ("SmolLM2-135M", "Llama-3.2-1B"), wanted)
    ),
)


def check(target: Target, results: Results, *, threads: int) -> Reached:
    """Look up the target's figures."""
    found = (results.find(target.part, peer, target.size, batch=target.batch, threads=threads) for peer in target.peers)
    present = [row for row in found if row is not None]
    return Reached(
        target=target,
        ours=results.find(target.part, target.ours, target.size, batch=target.batch, threads=threads),
        peer=max(present, key=lambda row: row.median) if present else None,
    )
