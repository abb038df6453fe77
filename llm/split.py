"""The part of each tensor that a rank has, by the tensor's name: our names, Meta's names, and those of LoRA factors.

Projections to heads and feed-forward units are split by rows, projections from them by columns. So a layer needs one
sum after attention and one after the feed-forward network (Megatron-LM, Shoeybi et al., 2019). Embedding and head are
split by tokens. Every rank has all of the norms and of the adapter's queries.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.ranks import Alone

Unit = Literal["heads", "kv_heads", "ffn", "vocabulary"]


class Cut(NamedTuple):
    """How a matrix is divided along `axis`: it consists of parts along its rows, each divided by its unit."""

    axis: int  # 0: rows, 1: columns
    units: tuple[Unit, ...]


_OURS = {
    r"embedding\.weight": Cut(0, ("vocabulary",)),
    r"head\.weight": Cut(0, ("vocabulary",)),
    r"layers\.\d+\.attention\.qkv\.(weight|bias)": Cut(0, ("heads", "kv_heads", "kv_heads")),
    r"layers\.\d+\.attention\.out\.weight": Cut(1, ("heads",)),
    r"layers\.\d+\.feed_forward\.gate_up\.(weight|bias)": Cut(0, ("ffn", "ffn")),
    r"layers\.\d+\.feed_forward\.down\.weight": Cut(1, ("ffn",)),
    r"adapter\.kv\.\d+\.weight": Cut(0, ("kv_heads", "kv_heads")),
    r"adapter\.gates": Cut(1, ("heads",)),
}
_ADDED_ONCE = re.compile(r"layers\.\d+\.(attention\.out|feed_forward\.down)\.bias")  # added after sums over ranks
# Of the matrices of Meta's checkpoints, by their names without `layers.N.` and `.weight`.
META_CUTS = {
    "attention.wq": Cut(0, ("heads",)),
    "attention.wk": Cut(0, ("kv_heads",)),
    "attention.wv": Cut(0, ("kv_heads",)),
    "attention.wo": Cut(1, ("heads",)),
    "feed_forward.w1": Cut(0, ("ffn",)),
    "feed_forward.w3": Cut(0, ("ffn",)),
    "feed_forward.w2": Cut(1, ("ffn",)),
    "tok_embeddings": Cut(0, ("vocabulary",)),
    "output": Cut(0, ("vocabulary",)),
}


def is_added_once(name: str) -> bool:
    """Whether a tensor of the state dict is a bias of a sum over ranks, which only the first rank may have."""
    return _ADDED_ONCE.fullmatch(name) is not None


def span(unit: Unit, *, whole: DecoderConfig, share: DecoderConfig) -> tuple[range, int]:
    """The rows or columns of a rank in a part of a matrix that is divided by `unit`, and the number of them in all."""
    size = whole.head_dim
    match unit:
        case "heads":
            return range(share.heads.start * size, share.heads.stop * size), whole.attention_dim
        case "kv_heads":
            return range(share.kv_heads.start * size, share.kv_heads.stop * size), whole.kv_dim
        case "ffn":
            return whole.ffn_range(share.rank, share.num_ranks), whole.ffn_dim
        case "vocabulary":
            return share.vocab_rows, whole.vocab_size


def take(name: str, tensor: Tensor, *, whole: DecoderConfig, share: DecoderConfig) -> Tensor:
    """A rank's part of a tensor of the state dict, plain or stored by a scheme.

    It is a view if the tensor has one part. Raises ValueError if a group of quantised weights would be divided.
    """
    if is_added_once(name):
        return tensor if share.rank == 0 else torch.zeros_like(tensor)
    plain = re.sub(r"weight_\w+$", "weight", name)  # what a scheme stores of a weight is divided as the weight
    cut = next((cut for pattern, cut in _OURS.items() if re.fullmatch(pattern, plain)), None)
    if cut is None:
        return tensor
    if name == "adapter.gates":
        return tensor[:, share.heads.start : share.heads.stop]
    spans = [span(unit, whole=whole, share=share) for unit in cut.units]
    if cut.axis == 1:
        return tensor if tensor.ndim == 1 else _columns(name, tensor, *spans[0])
    parts = torch.split(tensor, [count for _, count in spans])
    own = [part[places.start : places.stop] for part, (places, _) in zip(parts, spans, strict=True)]
    return torch.cat(own) if len(own) > 1 else own[0]


def _columns(name: str, tensor: Tensor, units: range, count: int) -> Tensor:
    """Columns `units` of `count`. A column of a stored weight may hold several inputs, or the scale of a group."""
    width = tensor.shape[1]
    start, stop = units.start * width, units.stop * width
    if start % count or stop % count:
        raise ValueError(f"`{name}` cannot be divided at inputs {units.start} and {units.stop}: groups are larger")
    return tensor[:, start // count : stop // count]


def share_of(config: DecoderConfig, ranks: Alone) -> DecoderConfig:
    """The share of this process's rank. Raises UsageError if the decoder cannot be divided over so many ranks."""
    return shares_of(config, ranks.size)[ranks.rank]


def shares_of(config: DecoderConfig, num_ranks: int) -> list[DecoderConfig]:
    """The share of each rank. Raises UsageError if the decoder cannot be divided over so many ranks."""
    try:
        return [config.share(rank, num_ranks) for rank in range(num_ranks)]
    except ValueError as error:
        raise UsageError(f"The decoder cannot be split over {num_ranks} ranks: {error}") from None


def dense(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with copies of those that are parts of larger tensors.

    Kernels can read the copies, and the copies do not keep the larger tensors in memory.
    """
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
