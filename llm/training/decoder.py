"""The decoder in training: the layers of `llm.model` with frozen weights, and the loss of labelled tokens."""

# B rows, S tokens, T tokens of all rows, Q adapter queries, D model width, L labelled positions, V vocabulary, K tokens

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators
from llama_adapter.llm.training.attention import Attend, attend, packed_attention
from llama_adapter.llm.training.layout import Layout, layout_of
from llama_adapter.llm.training.linear import AdaptedLinear
from llama_adapter.llm.training.operators import TRAINING, cross_entropy
from llama_adapter.runtime.operators import capped


class SoftLabels(NamedTuple):
    """Probabilities of tokens at labelled positions, in the order of rows and places. They are 0 in padding."""

    token_LK: Tensor  # int64
    share_LK: Tensor  # float32

    def to(self, device: torch.device) -> "SoftLabels":
        """The same on a device."""
        return SoftLabels(self.token_LK.to(device), self.share_LK.to(device))

    def loss(self, logits_LV: Tensor) -> Tensor:
        """The cross-entropy of each position, (L,)."""
        return -(self.share_LK * logits_LV.log_softmax(1).gather(1, self.token_LK)).sum(1)


class TrainableDecoder(nn.Module):
    """A decoder whose linear layers are `AdaptedLinear` and whose adapter is `TrainableAdapter`.

    Rows begin at position 0, and padding follows their tokens. Padding is not computed. With `checkpoint_layers`, each
    layer is computed again in the backward pass (Chen et al., 2016), so that memory holds the activations of one layer.
    """

    def __init__(self, decoder: LlamaAdapterDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.checkpoint_layers = False
        self.attend: Attend = attend
        use_operators(decoder, TRAINING)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the frozen weights and the activations."""
        return self.decoder.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.decoder.embedding.weight.device

    def release(self) -> None:
        """Free the memory of packed weights, which cannot be moved to a device.

        The decoder cannot be used afterwards.
        """
        for layer in self.modules():
            if isinstance(layer, AdaptedLinear) and not isinstance(layer.weight, Tensor):
                del layer.weight

    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor, visual_query_BQD: Tensor, soft: SoftLabels | None = None
    ) -> tuple[Tensor, Tensor]:
        """Float32 sums of the loss over all counted labels, (), and over those of each row, (B,).

        Logits at t are scored against labels at t + 1. `IGNORED` labels do not count. The visual query may have one
        row for all rows. If the head is trained, `soft` takes the place of the labels.
        """
        layout = layout_of(tokens_BS, labels_BS)
        hidden_LD = self.hidden(tokens_BS, visual_query_BQD, layout=layout)
        head, cap = self.decoder.head.weight, self.decoder.config.logit_cap
        if isinstance(head, Tensor) and head.requires_grad:
            logits_LV = capped(F.linear(hidden_LD, head.to(hidden_LD.dtype)).float(), cap)
            hard_L = layout.target_L
            loss_L = F.cross_entropy(logits_LV, hard_L, reduction="none") if soft is None else soft.loss(logits_LV)
        else:
            loss_L = cross_entropy(hidden_LD, head, layout.target_L, cap=cap)
        loss_B = torch.zeros(len(tokens_BS), device=loss_L.device).index_add(0, layout.row_L, loss_L)
        return loss_B.sum(), loss_B

    def hidden(self, tokens_BS: Tensor, visual_query_BQD: Tensor, *, layout: Layout) -> Tensor:
        """Final hidden states, after the last norm, of the tokens whose next token has a label, (L, D)."""
        decoder, num_rows = self.decoder, len(tokens_BS)
        prefix = decoder.project_prefix(visual_query_BQD.to(self.dtype))
        keys, values = (part.expand(-1, num_rows, -1, -1, -1) for part in prefix)
        rotaries = [[part[layout.place_T][:, None] for part in table.buffers()] for table in decoder.rotaries]
        x_TD = decoder.embed(layout.pack(tokens_BS[:, : layout.length]))
        for index, layer in enumerate(decoder.layers):
            j, is_last = index - decoder.config.first_adapter_layer, index == len(decoder.layers) - 1
            table = decoder.layer_tables[index]
            run = partial(
                _run_layer,
                layer,
                layout=layout,
                rotary=None if table is None else (rotaries[table][0], rotaries[table][1]),
                window=decoder.layer_windows[index],
                kept=layout.labelled_L if is_last else None,
                attend=self.attend,
            )
            arguments = (x_TD, keys[j], values[j]) if j >= 0 else (x_TD,)
            if self.checkpoint_layers and torch.is_grad_enabled():
                x_TD = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TD = run(*arguments)
        hidden: Tensor = decoder.norm(x_TD)
        return hidden


def _run_layer(
    layer: Any,
    x_TD: Tensor,
    *prefix: Tensor,
    layout: Layout,
    rotary: tuple[Tensor, Tensor] | None,
    window: int,
    kept: Tensor | None,
    attend: Attend,
) -> Tensor:
    """The tokens after a layer.

    Positional arguments are the tensors with gradients: the tokens, and the picture's keys and values if the layer
    attends to them. If `kept` is not None, only these tokens are computed after attention. It is used in the last
    layer, after which no other tokens are read.
    """
    heads_TD = packed_attention(
        layer.attention,
        layer.attention_norm(x_TD),
        layout=layout,
        rotary=rotary,
        window=window,
        prefix=(prefix[0], prefix[1]) if prefix else None,
        attend=attend,
    )
    if kept is not None:
        x_TD, heads_TD = x_TD.index_select(0, kept), heads_TD.index_select(0, kept)
    x_TD = x_TD + layer.attention_out_norm(layer.attention.out(heads_TD))
    out_TD: Tensor = x_TD + layer.feed_forward_out_norm(layer.feed_forward(layer.feed_forward_norm(x_TD)))
    return out_TD
