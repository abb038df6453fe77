"""The LLaMA decoder with adapter attention."""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, G heads of keys and values, H head size,
# D model width, V vocabulary

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from llama_adapter.llm.config import FINER_WEIGHTS, DecoderConfig
from llama_adapter.llm.model.adapter import Adapter
from llama_adapter.llm.model.kv import KVView, NoCache
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.rotary import Rotary
from llama_adapter.runtime.operators import (
    ATEN,
    Linear,
    Operators,
    capped,
    capped_attention,
    random_parameter,
)
from llama_adapter.runtime.ranks import ALONE, Alone


class RmsNorm(nn.Module):
    """Root mean square norm with a learned scale (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.operators = ATEN

    def forward(self, x: Tensor) -> Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)


class HeadsNorm(RmsNorm):
    """The norm of queries or keys (..., N, H), of each head or of all heads together: of as many numbers as `dim`."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(*x.shape[:-2], -1, self.dim)).reshape(x.shape)


class RotaryTable(nn.Module):
    """cos and sin of every position, float32 (positions, H) each. Both halves of a row are equal."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: Rotary, config: DecoderConfig) -> None:
        super().__init__()
        cos, sin = map(torch.from_numpy, rotary.table(config.head_dim, context=config.context))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)


class Beside(NamedTuple):
    """What a layer reads beside its input."""

    layer: int  # its number
    rotary: tuple[Tensor, Tensor] | None  # cos and sin at the tokens' positions; None: the layer does not rotate
    mask_B1SP: Tensor | None
    prefix: tuple[Tensor, Tensor] | None  # keys and gated values of the picture, in adapter layers
    cache: KVView
    places_B: Tensor | None  # the places of the only tokens that are computed to the end


class Attention(nn.Module):
    """Causal attention; with a prefix, plus the gated adapter attention.

    Rows of the packed projection are wq (N H), wk (G H), wv (G H). q and k rows are in half-split order.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(config.dim, config.attention_dim + 2 * config.kv_dim)
        self.q_norm, self.k_norm = (_heads_norm(config, num_heads) for num_heads in (self.num_heads, self.num_kv_heads))
        self.score_cap = config.score_cap
        self.out = Linear(config.attention_dim, config.dim)
        self.operators = ATEN
        self.ranks: Alone = ALONE

    def forward(self, x_BSD: Tensor, beside: Beside) -> Tensor:
        q_BSNH, k_BSGH, v_BSGH = self.split(self.qkv(x_BSD))
        q_BSNH, k_BSGH = self.q_norm(q_BSNH), self.k_norm(k_BSGH)
        if beside.rotary is not None:
            q_BSNH, k_BSGH = self.operators.rotate(q_BSNH, k_BSGH, *beside.rotary)
        q_BNSH = q_BSNH.transpose(1, 2)
        k_BGPH, v_BGPH = beside.cache.update(beside.layer, k_BSGH.transpose(1, 2), v_BSGH.transpose(1, 2))
        heads_BNSH = self._attend(q_BNSH, k_BGPH, v_BGPH, self.operators.causal_attention, beside.mask_B1SP)
        if (prefix := beside.prefix) is not None:
            if len(q_BNSH) < len(prefix[0]):  # one row stood for all; from here on, rows have different pictures
                q_BNSH = q_BNSH.expand(len(prefix[0]), -1, -1, -1)
            heads_BNSH = heads_BNSH + self._attend(q_BNSH, *prefix, self.operators.adapter_attention)
        return self.ranks.sum(self.out(_at(beside.places_B, heads_BNSH.transpose(1, 2).flatten(2))))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The packed projection (..., (N + 2 G) H) -> q (..., N, H), k and v (..., G, H), as views."""
        num_heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = torch.split(qkv.view(*qkv.shape[:-1], sum(num_heads), self.head_dim), num_heads, dim=-2)
        return q, k, v

    def _attend(
        self, q_BNSH: Tensor, k_BGPH: Tensor, v_BGPH: Tensor, attention: Callable[..., Tensor], *mask: Tensor | None
    ) -> Tensor:
        if self.score_cap:
            return capped_attention(q_BNSH, k_BGPH, v_BGPH, *(mask or (None,)), cap=self.score_cap)
        return attention(q_BNSH, k_BGPH, v_BGPH, *mask)


def _heads_norm(config: DecoderConfig, num_heads: int) -> nn.Module:
    if config.qk_norm == "none":
        return nn.Identity()
    return HeadsNorm(config.head_dim * (1 if config.qk_norm == "head" else num_heads), eps=config.norm_eps)


def _at(places_B: Tensor | None, x_BSD: Tensor) -> Tensor:
    """The token of x at one place of each row, (B, 1, D); all tokens if `places_B` is None.

    One row may stand for all.
    """
    if places_B is None:
        return x_BSD
    num_rows = len(x_BSD)
    return x_BSD[torch.arange(num_rows, device=x_BSD.device), places_B[:num_rows]][:, None]


class FeedForward(nn.Module):
    """down(activation(gate x) * up x); gate and up are one packed projection. The activation is silu or GELU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim)
        self.has_gelu = config.activation == "gelu_tanh"
        self.operators = ATEN
        self.ranks: Alone = ALONE

    def forward(self, x_BSD: Tensor) -> Tensor:
        activate = self.operators.geglu if self.has_gelu else self.operators.swiglu
        return self.ranks.sum(self.down(activate(self.gate_up(x_BSD))))


class Layer(nn.Module):
    """x += norm(Attention(norm(x))); x += norm(FeedForward(norm(x))), with the norms that the decoder has."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()

        def norm(*where: str) -> nn.Module:
            return RmsNorm(config.dim, eps=config.norm_eps) if config.norms in where else nn.Identity()

        self.attention_norm = norm("before", "both")
        self.attention = Attention(config)
        self.attention_out_norm = norm("after", "both")
        self.feed_forward_norm = norm("before", "both")
        self.feed_forward = FeedForward(config)
        self.feed_forward_out_norm = norm("after", "both")

    def forward(self, x_BSD: Tensor, beside: Beside) -> Tensor:
        attended_BSD = self.attention(self.attention_norm(x_BSD), beside)
        x_BSD = _at(beside.places_B, x_BSD) + self.attention_out_norm(attended_BSD)
        out: Tensor = x_BSD + self.feed_forward_out_norm(self.feed_forward(self.feed_forward_norm(x_BSD)))
        return out


def linears_of(layer: Layer) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
    """The linear layers in order: q, k and v; output; gate and up; down."""
    return layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down


def norms_of(layer: Layer) -> tuple[Tensor | None, ...]:
    """The weights of the norms: before and behind attention, before and behind the feed-forward network, of q, of k.

    None if the decoder does not have the norm.
    """
    attention = layer.attention
    norms = layer.attention_norm, layer.attention_out_norm, layer.feed_forward_norm, layer.feed_forward_out_norm
    return tuple(getattr(norm, "weight", None) for norm in (*norms, attention.q_norm, attention.k_norm))


class LlamaAdapterDecoder(nn.Module):
    """LLaMA (Touvron et al., 2023) whose last layers attend to a picture through zero-init gated adapter attention.

    `DecoderConfig` says what other families of decoders do differently.
    If the decoder is split (`DecoderConfig.share`), every rank's decoder must be called with the same arguments and
    returns the same numbers; see `use_ranks`.
    """

    finer_weights: ClassVar = FINER_WEIGHTS  # see schemes/state.py

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        num_tokens = len(config.vocab_rows)
        self.embedding = nn.Embedding(num_tokens, config.dim, _weight=random_parameter(num_tokens, config.dim, std=1.0))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.dim, eps=config.norm_eps)
        self.head = Linear(config.dim, num_tokens, bias=False)
        self.adapter = Adapter(config)
        self.operators = ATEN
        self.ranks: Alone = ALONE
        self.rotaries = nn.ModuleList(RotaryTable(rotary, config) for rotary in config.distinct_rotaries)
        # Of each layer. A table of None: it does not rotate; a window of 0: it sees all.
        self.layer_tables = config.layer_tables
        self.layer_windows = [config.window_of(layer) for layer in range(config.num_layers)]

    def table_of(self, layer: int) -> RotaryTable | None:
        """The rotary table of a layer; None if it does not rotate."""
        index = self.layer_tables[layer]
        return None if index is None else self.rotaries[index]  # type: ignore[return-value]

    def project_prefix(self, visual_query_BQD: Tensor) -> Prefix:
        """Visual query (B, Q, D) -> keys and gated values of every adapter layer."""
        adapter_layers = self.layers[self.config.first_adapter_layer :]
        prefix: Prefix = self.adapter(visual_query_BQD, [layer.attention for layer in adapter_layers])
        return prefix

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        mask_B1SP: Tensor | None,
        prefix: Prefix,
        cache: KVView | None = None,
        places_B: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, S) int64 at positions (B, S) int64 -> final hidden states (B, S, D), after the last norm.

        Embeddings (B, S, D) may be given in place of ids, as pictures are.

        With `places_B` int64, only the token at this place of each row is returned, (B, 1, D), and the end of the last
        layer is computed for these tokens only.

        `mask_B1SP` is bool, True where a token may attend. If its B is 1, it is broadcast. None stands for a causal
        mask of S tokens without others before them, if the operators know it and the config has no windows and no cap.
        Without a cache, P = S and tokens attend only to each other, with gradients, as in training and scoring.

        If all rows have the same tokens, a single row (1, S) is enough. Everything before the first adapter attention
        does not depend on the picture and is computed once. The number of rows B is then that of the prefix.
        """
        cache = NoCache() if cache is None else cache
        first_adapter_layer = self.config.first_adapter_layer
        num_rows = max(len(tokens_BS), prefix.k.shape[1])
        x_BSD = tokens_BS if tokens_BS.is_floating_point() else self.embed(tokens_BS)
        tables = [[part[positions_BS].unsqueeze(2) for part in table.buffers()] for table in self.rotaries]
        shared_rotaries = self._laid_out(tables, num_rows=len(tokens_BS), dtype=x_BSD.dtype)
        rotaries = shared_rotaries
        if num_rows > len(tokens_BS):
            rotaries = self._laid_out(tables, num_rows=num_rows, dtype=x_BSD.dtype)
        masks = self._masks(mask_B1SP, positions_BS, cache)
        for index, layer in enumerate(self.layers):
            j = index - first_adapter_layer
            rotary, table = rotaries if j > 0 else shared_rotaries, self.layer_tables[index]
            beside = Beside(
                layer=index,
                rotary=None if table is None else rotary[table],
                mask_B1SP=masks[self.layer_windows[index]],
                prefix=(prefix.k[j], prefix.v[j]) if j >= 0 else None,
                cache=cache,
                places_B=places_B if index == self.config.num_layers - 1 else None,
            )
            x_BSD = layer(x_BSD, beside)
        hidden_BSD: Tensor = self.norm(x_BSD)
        return hidden_BSD.expand(num_rows, -1, -1)

    def _laid_out(
        self, tables: Sequence[Sequence[Tensor]], *, num_rows: int, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
        """The rotary tables at the tokens' positions, as the operators read them."""
        return [self.operators.lay_out_rotary(cos_BS1H, sin_BS1H, num_rows, dtype) for cos_BS1H, sin_BS1H in tables]

    def _masks(self, mask_B1SP: Tensor | None, positions_BS: Tensor, cache: KVView) -> Mapping[int, Tensor | None]:
        """The mask for each window of the layers."""
        masks = {0: mask_B1SP}
        for window in self.config.windows:
            assert mask_B1SP is not None, "a decoder with windows needs a mask"
            distance_BSP = positions_BS[:, :, None] - cache.positions(positions_BS)[:, None]
            masks[window] = mask_B1SP & (distance_BSP < window)[:, None]
        return masks

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids -> embeddings (..., D)."""
        embedded: Tensor
        if self.config.num_ranks == 1:
            embedded = self.embedding(tokens)
            return embedded
        rows = self.config.vocab_rows
        is_here = (tokens >= rows.start) & (tokens < rows.stop)
        embedded = self.embedding((tokens - rows.start).where(is_here, 0))
        return self.ranks.sum(embedded.where(is_here[..., None], 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., D) -> float32 logits (..., V)."""
        logits = capped(self.head(hidden).float(), self.config.logit_cap)
        return self.ranks.join(logits, width=self.config.vocab_size)


def use_operators(decoder: LlamaAdapterDecoder, operators: Operators) -> None:
    """Set the operators of every module of `decoder`."""
    for module in decoder.modules():
        if isinstance(module, LlamaAdapterDecoder | RmsNorm | Attention | FeedForward):
            module.operators = operators


def use_ranks(decoder: LlamaAdapterDecoder, ranks: Alone) -> None:
    """Set the ranks with which every module of `decoder`, one rank's share, computes its sums."""
    for module in decoder.modules():
        if isinstance(module, LlamaAdapterDecoder | Attention | FeedForward):
            module.ranks = ranks
