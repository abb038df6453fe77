"""Our figures as shares of the machine's memory bandwidth and of its matmul rate."""

from collections.abc import Mapping
from dataclasses import dataclass

from llama_adapter.app.models.roofline import NumberSizes, Work, encoder_work, prefill_work, step_work
from scripts.peers.results import Results, Row
from scripts.peers.sizes import NUM_PROMPT_TOKENS, num_steps
from scripts.peers.table import Device
from scripts.peers.weights import bare_tower, decoder_sizes

_INT4 = 4.5 / 8  # one 16-bit scale for 32 weights
# Our engines by device: the sizes of their numbers in bytes, and the ceiling of their matrix products.
_FLOATS = {
    "ours-float32": (NumberSizes(4, 4), "matmul-float32"),
    "ours-float16": (NumberSizes(2, 2), "matmul-float16"),
    **dict.fromkeys(
        ("ours-bfloat16", "ours-bfloat16-eager", "ours-bfloat16-64-slots", "ours-bfloat16-most-slots"),
        (NumberSizes(2, 2), "matmul-bfloat16"),
    ),
}
OURS: Mapping[Device, Mapping[str, tuple[NumberSizes, str]]] = {
    "cpu": {
        **_FLOATS,
        "ours-int8": (NumberSizes(1, 4), "matmul-int8"),
        "ours-int4": (NumberSizes(_INT4, 4), "matmul-int4"),
    },
    "cuda": {
        **_FLOATS,
        "ours-int8": (NumberSizes(1, 2), "matmul-int8"),
        "ours-int4": (NumberSizes(_INT4, 2), "matmul-int4"),
    },
}
_MOST = 0.7  # A figure counts as bound by a ceiling from this share on


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Shares of the ceilings of the same run. The bandwidth is the one between the steps if it was measured."""

    memory: float
    arithmetic: float

    @property
    def sentence(self) -> str:
        """A few words on what bounds a figure."""
        if max(self.memory, self.arithmetic) < _MOST:
            return f"neither: {self.memory:.0%} of bandwidth, {self.arithmetic:.0%} of matmul"
        if self.memory > self.arithmetic:
            return f"memory: {self.memory:.0%} of bandwidth"
        return f"arithmetic: {self.arithmetic:.0%} of matmul"


def share_of(row: Row, results: Results) -> Share | None:
    """The shares for one of our figures; None for other engines, or if its run measured no ceiling."""
    ours = OURS[results.device]
    if row.engine not in ours or row.part not in ("decode", "prefill", "vision"):
        return None
    sizes, matmul = ours[row.engine]
    read_row = results.find("ceiling", "read", row.size, batch=1, threads=row.threads, run=row.run)
    matmul_row = results.find("ceiling", matmul, row.size, batch=1, threads=row.threads, run=row.run)
    if read_row is None or matmul_row is None:
        return None
    work, seconds = _work(row, sizes, device=results.device)
    # The best rate of a ceiling counts, because slower rounds were disturbed.
    memory = work.bytes / seconds / max(read_row.rates)
    if row.per_byte_read is not None:
        memory = work.bytes * row.per_byte_read / row.batch
    return Share(memory=memory, arithmetic=work.flops / seconds / max(matmul_row.rates))


def _work(row: Row, sizes: NumberSizes, *, device: Device) -> tuple[Work, float]:
    """The work of one call, and the seconds it took."""
    if row.part == "vision":
        return encoder_work(bare_tower(row.size), num_pictures=row.batch, sizes=sizes), row.batch / row.median
    config = decoder_sizes(row.size)
    if row.part == "prefill":
        lengths = [NUM_PROMPT_TOKENS] * row.batch
        work = prefill_work(config, lengths=lengths, num_logits=row.batch, sizes=sizes)
        return work, row.batch * NUM_PROMPT_TOKENS / row.median
    middle = NUM_PROMPT_TOKENS + num_steps(row.size, device=device) // 2
    return step_work(config, positions=[middle] * row.batch, sizes=sizes), row.batch / row.median
