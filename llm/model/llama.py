"""The LLaMA decoder with adapter attention."""

# B rows, S step tokens, P positions attended to, Q adapter queries, N heads, H head size, D model width, V vocabulary

import torch
from torch import Tensor, nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.adapter import Adapter
from llama_adapter.llm.model.kv import KVView, NoCache
from llama_adapter.llm.prefix import Prefix
from llama_adapter.runtime.operators import ATEN, Linear, Operators, random_parameter, rotary_table
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


class Attention(nn.Module):
    """Causal attention; with a prefix, plus the gated adapter attention.

    Rows of the packed projection are wq, wk, wv. q and k rows are in half-split order. The k and v parts of its bias
    are zero in all checkpoints with an adapter prefix.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(config.dim, 3 * config.attention_dim)
        self.out = Linear(config.attention_dim, config.dim)
        self.operators = ATEN
        self.ranks: Alone = ALONE

    def forward(
        self,
        x_BSD: Tensor,
        *,
        layer: int,
        rotary: tuple[Tensor, Tensor],
        mask_B1SP: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        cache: KVView,
        places_B: Tensor | None = None,
    ) -> Tensor:
        q_BSNH, k_BSNH, v_BSNH = self.qkv(x_BSD).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q_BSNH, k_BSNH = self.operators.rotate(q_BSNH, k_BSNH, *rotary)
        q_BNSH = q_BSNH.transpose(1, 2)
        k_BNPH, v_BNPH = cache.update(layer, k_BSNH.transpose(1, 2), v_BSNH.transpose(1, 2))
        heads_BNSH = self.operators.causal_attention(q_BNSH, k_BNPH, v_BNPH, mask_B1SP)
        if prefix is not None:
            if len(q_BNSH) < len(prefix[0]):  # one row stood for all; from here on, rows have different pictures
                q_BNSH = q_BNSH.expand(len(prefix[0]), -1, -1, -1)
            heads_BNSH = heads_BNSH + self.operators.adapter_attention(q_BNSH, *prefix)
        return self.ranks.sum(self.out(_at(places_B, heads_BNSH.transpose(1, 2).flatten(2))))


def _at(places_B: Tensor | None, x_BSD: Tensor) -> Tensor:
    """The token of x at one place of each row, (B, 1, D); all tokens if `places_B` is None.

    One row may stand for all.
    """
    if places_B is None:
        return x_BSD
    num_rows = len(x_BSD)
    return x_BSD[torch.arange(num_rows, device=x_BSD.device), places_B[:num_rows]][:, None]


class FeedForward(nn.Module):
    """down(silu(gate x) * up x); gate and up are one packed projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim)
        self.operators = ATEN
        self.ranks: Alone = ALONE

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.ranks.sum(self.down(self.operators.swiglu(self.gate_up(x_BSD))))


class Layer(nn.Module):
    """x += Attention(norm(x)); x += FeedForward(norm(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RmsNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        layer: int,
        rotary: tuple[Tensor, Tensor],
        mask_B1SP: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        cache: KVView,
        places_B: Tensor | None = None,
    ) -> Tensor:
        x_BSD = _at(places_B, x_BSD) + self.attention(
            self.attention_norm(x_BSD),
            layer=layer,
            rotary=rotary,
            mask_B1SP=mask_B1SP,
            prefix=prefix,
            cache=cache,
            places_B=places_B,
        )
        out: Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return out


def linears_of(layer: Layer) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
    """The linear layers in order: q, k and v; output; gate and up; down."""
    return layer.attention.qkv, layer.attention.out, layer.feed_forward.gate_up, layer.feed_forward.down


class LlamaAdapterDecoder(nn.Module):
    """LLaMA (Touvron et al., 2023) whose last layers attend to a picture through zero-init gated adapter attention.

    If the decoder is split (`DecoderConfig.share`), every rank's decoder must be called with the same arguments and
    returns the same numbers; see `use_ranks`.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor

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
        with torch.device("cpu"):  # real values even if the weights are on the meta device
            cos, sin = rotary_table(config.head_dim, num_positions=config.context, theta=config.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def project_prefix(self, visual_query_BQD: Tensor) -> Prefix:
        """Visual query (B, Q, D) -> keys and gated values of every adapter layer."""
        adapter_layers = self.layers[self.config.first_adapter_layer :]
        projections = [layer.attention.qkv for layer in adapter_layers]  # type: ignore[union-attr]
        prefix: Prefix = self.adapter(visual_query_BQD, projections)
        return prefix

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        mask_B1SP: Tensor,
        prefix: Prefix,
        cache: KVView | None = None,
        places_B: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, S) int64 at positions (B, S) int64 -> final hidden states (B, S, D), after the last norm.

        With `places_B` int64, only the token at this place of each row is returned, (B, 1, D), and the end of the last
        layer is computed for these tokens only.

        `mask_B1SP` is bool, True where a token may attend. If its B is 1, it is broadcast. Without a cache, P = S and
        tokens attend only to each other, with gradients, as in training and scoring.

        If all rows have the same tokens, a single row (1, S) is enough. Everything before the first adapter attention
        does not depend on the picture and is computed once. The number of rows B is then that of the prefix.
        """
        cache = NoCache() if cache is None else cache
        first_adapter_layer = self.config.first_adapter_layer
        num_rows = max(len(tokens_BS), prefix.k.shape[1])
        x_BSD = self.embed(tokens_BS)
        cos_BS1H, sin_BS1H = self.rotary_cos[positions_BS].unsqueeze(2), self.rotary_sin[positions_BS].unsqueeze(2)
        shared_rotary = self.operators.lay_out_rotary(cos_BS1H, sin_BS1H, len(tokens_BS), x_BSD.dtype)
        rotary = shared_rotary
        if num_rows > len(tokens_BS):
            rotary = self.operators.lay_out_rotary(cos_BS1H, sin_BS1H, num_rows, x_BSD.dtype)
        for index, layer in enumerate(self.layers):
            j = index - first_adapter_layer
            x_BSD = layer(
                x_BSD,
                layer=index,
                rotary=rotary if j > 0 else shared_rotary,
                mask_B1SP=mask_B1SP,
                prefix=(prefix.k[j], prefix.v[j]) if j >= 0 else None,
                cache=cache,
                places_B=places_B if index == self.config.num_layers - 1 else None,
            )
        hidden_BSD: Tensor = self.norm(x_BSD)
        return hidden_BSD.expand(num_rows, -1, -1)

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
        logits: Tensor = self.head(hidden)
        return self.ranks.join(logits.float(), width=self.config.vocab_size)


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
