"""An opened LLaMA, whatever form it came in: its sizes and its tensors under Meta's names, still on disk."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.llm.weights.names import Shape


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor in one or several parts that are joined along `axis`; nothing is copied before `read`."""

    parts: tuple[Tensor, ...]
    axis: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of the joined tensor."""
        if len(self.parts) == 1:
            return tuple(self.parts[0].shape)
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def read(self) -> Tensor:
        """The joined tensor, in the type of the file; a view of the file if there is one part."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=self.axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSource:
    """A complete LLaMA: every tensor of `llama_shapes` is in `tensors`, with that shape.

    `half_split` says that the rows of wq and wk are in Hugging Face's order already.
    """

    name: str  # for messages and records: the folder
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    half_split: bool
    tensors: Mapping[str, SplitTensor]
    files: tuple[str, ...]  # paths of the tensor files, in order
