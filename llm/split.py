"""Which part of each tensor a rank has, by the tensor's name: ours, Meta's and that of LoRA's factors.

Projections into heads and feed-forward units are split by rows, those out of them by columns, so a layer needs one sum
after attention and one after the feed-forward network (Megatron-LM, Shoeybi et al., 2019). Embedding and head are split
by tokens. Norms and the adapter's queries are whole on each rank.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.ranks import Alone

Unit = Literal["heads", "ffn", "vocabulary"]


class Cut(NamedTuple):
    """How a matrix is divided: `parts` stand one below the other, and each is divided along `axis` by `unit`."""

    axis: int  # 0: rows, 1: columns
    unit: Unit
    parts: int = 1


_OURS = {
    r"embedding\.weight": Cut(0, "vocabulary"),
    r"head\.weight": Cut(0, "vocabulary"),
    r"layers\.\d+\.attention\.qkv\.(weight|bias)": Cut(0, "heads", 3),
    r"layers\.\d+\.attention\.out\.weight": Cut(1, "heads"),
    r"layers\.\d+\.feed_forward\.gate_up\.(weight|bias)": Cut(0, "ffn", 2),
    r"layers\.\d+\.feed_forward\.down\.weight": Cut(1, "ffn"),
    r"adapter\.kv\.\d+\.weight": Cut(0, "heads", 2),
    r"adapter\.gates": Cut(1, "heads"),
}
_ADDED_ONCE = re.compile(r"layers\.\d+\.(attention\.out|feed_forward\.down)\.bias")  # of sums over ranks
_META = {
    "attention.wq": Cut(0, "heads"),
    "attention.wk": Cut(0, "heads"),
    "attention.wv": Cut(0, "heads"),
    "attention.wo": Cut(1, "heads"),
    "feed_forward.w1": Cut(0, "ffn"),
    "feed_forward.w3": Cut(0, "ffn"),
    "feed_forward.w2": Cut(1, "ffn"),
    "tok_embeddings": Cut(0, "vocabulary"),
    "output": Cut(0, "vocabulary"),
}


def cut_of(name: str) -> Cut | None:
    """How a tensor of a decoder's state dict is divided; None for one that is whole on each rank.

    The tensors that a quantised weight is stored in are divided as the weight.
    """
    plain = re.sub(r"weight_\w+$", "weight", name)
    return next((cut for pattern, cut in _OURS.items() if re.fullmatch(pattern, plain)), None)


def meta_cut(matrix: str) -> Cut | None:
    """How a matrix of Meta's checkpoints is divided, by its name without `layers.N.` and `.weight`; None: it is not."""
    return _META.get(matrix)


def is_added_once(name: str) -> bool:
    """Whether a tensor of the state dict is added after a sum over ranks, so that the first rank alone has it."""
    return _ADDED_ONCE.fullmatch(name) is not None


def span(cut: Cut, *, whole: DecoderConfig, share: DecoderConfig) -> tuple[range, int]:
    """The units of a rank in one part of a matrix, and how many that part has: of rows or columns, by `cut.axis`."""
    if cut.unit == "heads":
        return range(share.heads.start * share.head_dim, share.heads.stop * share.head_dim), whole.dim
    if cut.unit == "ffn":
        return whole.ffn_range(share.rank, share.num_ranks), whole.ffn_dim
    return share.vocab_rows, whole.vocab_size


def take(name: str, tensor: Tensor, *, whole: DecoderConfig, share: DecoderConfig) -> Tensor:
    """A rank's part of a tensor of the state dict, plain or stored by a scheme; a view where there is one part.

    Raises ValueError where a group of quantised weights would be torn apart.
    """
    if is_added_once(name):
        return tensor if share.rank == 0 else torch.zeros_like(tensor)
    cut = cut_of(name)
    if cut is None:
        return tensor
    units, count = span(cut, whole=whole, share=share)
    if name == "adapter.gates":
        return tensor[:, share.heads.start : share.heads.stop]
    if cut.axis == 1:
        return tensor if tensor.ndim == 1 else _columns(name, tensor, units, count)
    parts = tensor.reshape(cut.parts, count, *tensor.shape[1:])
    return parts[:, units.start : units.stop].flatten(0, 1)


def _columns(name: str, tensor: Tensor, units: range, count: int) -> Tensor:
    """Columns `units` of `count`; of stored weights a column may hold several inputs, or a group's scale."""
    width = tensor.shape[1]
    start, stop = units.start * width, units.stop * width
    if start % count or stop % count:
        raise ValueError(f"`{name}` cannot be divided at inputs {units.start} and {units.stop}: groups are larger")
    return tensor[:, start // count : stop // count]


def share_of(config: DecoderConfig, ranks: Alone) -> DecoderConfig:
    """The share of the rank that this process is. Raises UsageError where the decoder cannot be divided so."""
    return shares_of(config, ranks.size)[ranks.rank]


def shares_of(config: DecoderConfig, num_ranks: int) -> list[DecoderConfig]:
    """The share of each rank. Raises UsageError where the decoder cannot be divided so."""
    try:
        return [config.share(rank, num_ranks) for rank in range(num_ranks)]
    except ValueError as error:
        raise UsageError(f"The decoder cannot be split over {num_ranks} ranks: {error}") from None


def dense(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are parts of larger ones as copies, which kernels can read and which keep nothing else in memory."""
    for name, tensor in tensors:
        own = [
            tensor.clone(memory_format=torch.contiguous_format)
            if tensor.untyped_storage().nbytes() > tensor.nbytes
            else tensor
        ]
        del tensor
        yield name, own.pop()


def take_all(
    tensors: Iterable[tuple[str, Tensor]], *, whole: DecoderConfig, share: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    """A rank's parts of the tensors of a state dict, one by one."""
    return dense((name, take(name, tensor, whole=whole, share=share)) for name, tensor in tensors)
