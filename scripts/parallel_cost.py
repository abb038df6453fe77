"""Estimates the cost of a decode step of a split decoder: bytes of weights, and collectives of the ranks.

A step reads each rank's weights once. It sums the ranks' outputs twice in each layer and once for the embedding,
gathers the logits, and sends the chosen tokens. A ring over N ranks passes 2 (N - 1) / N of a tensor over each link
(Patarasuk and Yuan, 2009), and no collective is faster than its latency.
"""

from dataclasses import dataclass

from llama_adapter.llm.config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Published figures of a machine, in bytes per second; the latency of a collective is an assumption."""

    name: str
    memory: float  # bandwidth of one device
    link: float  # bandwidth of one device in one direction


H100 = Machine(name="H100, NVLink 4", memory=3.35e12, link=450e9)
ASCEND_910B = Machine(name="Ascend 910B, HCCS", memory=1.6e12, link=196e9)
LATENCIES_S = (10e-6, 20e-6, 40e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One decode step, in seconds."""

    weights: float
    collectives: float

    @property
    def total(self) -> float:
        return self.weights + self.collectives


def num_weights(config: DecoderConfig) -> int:
    """The number of weights that a step reads: all except the embedding, whose rows are too few to count."""
    layer = 4 * config.dim**2 + 3 * config.dim * config.ffn_dim
    return config.num_layers * layer + config.vocab_size * config.dim


def num_sums(config: DecoderConfig) -> int:
    """The number of tensors of model width that are summed over the ranks in a step."""
    return 2 * config.num_layers + 1


def link_bytes(config: DecoderConfig, *, ranks: int, rows: int, item_bytes: int) -> float:
    """Bytes that a rank sends in a step with `rows` sequences; logits are gathered in float32."""
    sums = num_sums(config) * 2 * (ranks - 1) / ranks * rows * config.dim * item_bytes
    return sums + (ranks - 1) / ranks * rows * config.vocab_size * 4


def step(
    config: DecoderConfig,
    machine: Machine,
    *,
    ranks: int,
    rows: int,
    latency_s: float,
    weight_bytes: float = 2,
    item_bytes: int = 2,
) -> Step:
    """The time of a step that is bound by memory and links; arithmetic and kernel launches are ignored."""
    weights = num_weights(config) * weight_bytes / ranks / machine.memory
    if ranks == 1:
        return Step(weights=weights, collectives=0.0)
    sent = link_bytes(config, ranks=ranks, rows=rows, item_bytes=item_bytes) / machine.link
    return Step(weights=weights, collectives=(num_sums(config) + 2) * latency_s + sent)
