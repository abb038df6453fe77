"""The decoder as it is trained: the layers of `llm.model` over frozen weights, and the loss of labelled tokens."""

# B rows, S tokens, Q adapter queries, D model width, L labelled positions, V vocabulary

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llama_adapter.llm.model.kv import NoCache
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.training.linear import AdaptedLinear
from llama_adapter.llm.training.loss import cross_entropy
from llama_adapter.llm.training.operators import TRAINING

IGNORED = 0  # label of a position that does not count, as in the reference


class TrainableDecoder(nn.Module):
    """A decoder whose linear layers are `AdaptedLinear` and whose adapter is `TrainableAdapter`.

    Rows begin at position 0 and are padded behind their tokens. `checkpoint_layers` computes each layer again in the
    backward pass (Chen et al., 2016), so that memory holds the activations of one layer.
    """

    def __init__(self, decoder: LlamaAdapterDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.checkpoint_layers = False
        use_operators(decoder, TRAINING)

    @property
    def dtype(self) -> torch.dtype:
        """Of the frozen weights and the activations."""
        return self.decoder.head.weight.dtype

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, visual_query_BQD: Tensor) -> tuple[Tensor, Tensor]:
        """The float32 sums of the loss over all counted labels, and over those of each row, (B).

        Logits at t are scored against labels at t + 1; label 0 does not count. The visual query may have one row for
        all.
        """
        hidden_BSD = self.hidden(tokens_BS, visual_query_BQD)
        targets_BS = labels_BS[:, 1:]
        row_L, place_L = (targets_BS != IGNORED).nonzero(as_tuple=True)
        loss_L = cross_entropy(hidden_BSD[row_L, place_L], self.decoder.head.weight, targets_BS[row_L, place_L])
        loss_B = torch.zeros(len(tokens_BS), device=loss_L.device).index_add(0, row_L, loss_L)
        return loss_B.sum(), loss_B

    def logits(self, tokens_BS: Tensor, visual_query_BQD: Tensor) -> Tensor:
        """Float32 logits (B, S, V) of all positions."""
        return self.decoder.logits(self.hidden(tokens_BS, visual_query_BQD))

    def hidden(self, tokens_BS: Tensor, visual_query_BQD: Tensor) -> Tensor:
        """Token ids (B, S) int64 and a visual query (B or 1, Q, D) -> final hidden states (B, S, D), normed."""
        decoder = self.decoder
        prefix = self._prefix(visual_query_BQD, num_rows=len(tokens_BS))
        rotary = tuple(table[None, : tokens_BS.shape[1], None] for table in (decoder.rotary_cos, decoder.rotary_sin))
        mask_B1SP = torch.empty(0, device=tokens_BS.device)  # the operator is causal by itself
        x_BSD = decoder.embed(tokens_BS)
        for index, layer in enumerate(decoder.layers):
            j = index - decoder.config.first_adapter_layer
            keys_values = (prefix.k[j], prefix.v[j]) if j >= 0 else None
            run = _Run(layer, index=index, rotary=rotary, mask_B1SP=mask_B1SP)
            if self.checkpoint_layers and torch.is_grad_enabled():
                x_BSD = checkpoint(run, x_BSD, keys_values, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BSD = run(x_BSD, keys_values)
        hidden_BSD: Tensor = decoder.norm(x_BSD)
        return hidden_BSD

    def _prefix(self, visual_query_BQD: Tensor, *, num_rows: int) -> Prefix:
        decoder = self.decoder
        adapter_layers = decoder.layers[decoder.config.first_adapter_layer :]
        bare: Sequence[Callable[[Tensor], Tensor]] = [layer.attention.qkv.bare for layer in adapter_layers]
        prefix: Prefix = decoder.adapter(visual_query_BQD.to(self.dtype), bare)
        return Prefix(*(part.expand(-1, num_rows, -1, -1, -1) for part in prefix))


class _Run:
    """A layer as a function of what gradients go through."""

    def __init__(self, layer: nn.Module, *, index: int, rotary: tuple[Tensor, ...], mask_B1SP: Tensor) -> None:
        self._layer, self._index, self._rotary, self._mask_B1SP = layer, index, rotary, mask_B1SP

    def __call__(self, x_BSD: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        out_BSD: Tensor = self._layer(
            x_BSD,
            layer=self._index,
            rotary=self._rotary,
            mask_B1SP=self._mask_B1SP,
            prefix=prefix,
            cache=NoCache(),
        )
        return out_BSD


def adapted_layers(decoder: LlamaAdapterDecoder, layer: int) -> dict[tuple[str, ...], AdaptedLinear]:
    """The linear layers of layer number `layer`, by Meta's names of their parts."""
    block = decoder.layers[layer]
    return {parts: block.get_submodule(path) for path, parts in PARTS.items()}


# Our packed layers of a block, and Meta's names of their parts.
PARTS = {
    "attention.qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attention.out": ("attention.wo",),
    "feed_forward.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.down": ("feed_forward.w2",),
}
