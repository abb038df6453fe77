"""What was aimed at: ratios of two engines' medians, and shares of what the machine can do. Arithmetic only."""

from collections.abc import Iterator
from dataclasses import dataclass

from scripts.peers.results import Results, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One engine of ours at least `wanted` times the best of `peers`, in one figure."""

    part: str
    ours: str
    peers: tuple[str, ...]
    size: str
    batch: int
    wanted: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """A target beside what was measured; `ratio` is None where a figure is missing."""

    target: Target
    ours: Row | None
    peer: Row | None  # the best of the target's

    @property
    def ratio(self) -> float | None:
        """Ours by theirs, medians."""
        if self.ours is None or self.peer is None:
            return None
        return self.ours.median / self.peer.median

    @property
    def is_met(self) -> bool | None:
        """Whether what is wanted was reached; None where it was not measured."""
        return None if self.ratio is None else self.ratio >= self.target.wanted

    @property
    def is_interleaved(self) -> bool:
        """Whether both were measured in turn, in one run."""
        return self.ours is not None and self.peer is not None and self.ours.run == self.peer.run


LLAMA_CPP = ("llama.cpp-bf16", "llama.cpp-q8_0", "llama.cpp-q4_0")
BATCH_SIZES = (1, 5, 16)
PREFILL_BATCH_SIZES = (1, 5)
_JOB_ENCODERS = ("embedded", "ViT-L/14")


def _decode(ours: str, peer: str, size: str, batch: int, wanted: float) -> Target:
    return Target(part="decode", ours=ours, peers=(peer,), size=size, batch=batch, wanted=wanted)


def _prefill(ours: str, peer: str, size: str, batch: int, wanted: float) -> Target:
    return Target(part="prefill", ours=ours, peers=(peer,), size=size, batch=batch, wanted=wanted)


def decoder_targets() -> Iterator[Target]:
    """Decode and prefill, of both decoders."""
    for size in ("1B", "160M"):
        for batch in BATCH_SIZES:
            yield _decode("ours-float32", "hf-float32", size, batch, 1.8)
        for batch in PREFILL_BATCH_SIZES:
            yield _prefill("ours-float32", "hf-float32", size, batch, 1.8)
    for size, wanted in (("1B", 1.0), ("160M", 0.9)):
        for batch in BATCH_SIZES:
            yield _decode("ours-bfloat16", "llama.cpp-bf16", size, batch, wanted)
        for batch in PREFILL_BATCH_SIZES:
            yield _prefill("ours-bfloat16", "llama.cpp-bf16", size, batch, 1.3)
    for batch, wanted in ((1, 1.2), (5, 3.0), (16, 2.5)):
        yield _decode("ours-int8", "llama.cpp-q8_0", "1B", batch, wanted)
    for batch in (5, 16):
        yield Target(part="decode", ours="ours-int8", peers=LLAMA_CPP, size="1B", batch=batch, wanted=1.2)
    yield _decode("ours-int8", "llama.cpp-q8_0", "160M", 1, 0.9)
    for size in ("1B", "160M"):
        for batch in PREFILL_BATCH_SIZES:
            yield _prefill("ours-int8", "llama.cpp-q8_0", size, batch, 3.0)


def job_targets() -> Iterator[Target]:
    """The caption job, from files to texts, in front of both decoders, with both encoders."""
    for decoder in ("1B", "160M"):
        for encoder in _JOB_ENCODERS:
            yield Target(
                part="job",
                ours="ours-float32",
                peers=("reference-float32",),
                size=f"{decoder}+{encoder}",
                batch=5,
                wanted=4.0,
            )


def vision_targets() -> Iterator[Target]:
    """CLIP's tower, against the better of two runtimes in float32, and int8 against what people start from."""
    others = ("onnxruntime-float32", "openvino-float32")
    for batch in BATCH_SIZES:
        yield Target(part="vision", ours="ours-float32", peers=others, size="ViT-L/14", batch=batch, wanted=1.0)
    for batch in BATCH_SIZES:
        yield Target(part="vision", ours="ours-int8", peers=("hf-float32",), size="ViT-L/14", batch=batch, wanted=5.0)


TARGETS: tuple[Target, ...] = (*decoder_targets(), *job_targets(), *vision_targets())


def check(target: Target, results: Results, *, threads: int) -> Reached:
    """The target beside its figures."""
    found = (results.find(target.part, peer, target.size, batch=target.batch, threads=threads) for peer in target.peers)
    present = [row for row in found if row is not None]
    return Reached(
        target=target,
        ours=results.find(target.part, target.ours, target.size, batch=target.batch, threads=threads),
        peer=max(present, key=lambda row: row.median) if present else None,
    )
