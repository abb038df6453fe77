"""The decoder's forward pass for training. Its last layer computes only the answer tokens."""

# B rows, S tokens, A answer tokens of a row, P positions attended to, N heads, H head size, D model width

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.model.kv import NoCache
from llama_adapter.llm.model.llama import Layer, LlamaAdapterDecoder, use_operators
from llama_adapter.runtime.operators import ATEN
from scripts.train_embedded.packing import Packed


def train_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """Causal attention that adds a bias in place of filling masked scores; this is faster forward and backward."""
    scale = q_BNSH.shape[-1] ** -0.5
    bias_B1SP = torch.zeros_like(mask_B1SP, dtype=q_BNSH.dtype).masked_fill_(~mask_B1SP, -1e9)
    scores_BNSP = ((q_BNSH * scale) @ k_BNPH.transpose(-1, -2)).add_(bias_B1SP)
    heads_BNSH: Tensor = scores_BNSP.softmax(dim=-1) @ v_BNPH
    return heads_BNSH


OPERATORS = replace(ATEN, name="training", causal_attention=train_attention)


def answer_states(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> Tensor:
    """Normed hidden states (number of answer tokens, D) that predict the answers' tokens."""
    prefix = decoder.project_prefix(visual_query_BQD)
    last = len(decoder.layers) - 1
    x_BSD = decoder.embedding(packed.tokens_BS)
    cos, sin = (table[packed.positions_BS].unsqueeze(2) for table in (decoder.rotary_cos, decoder.rotary_sin))
    for index in range(last):
        j = index - decoder.config.first_adapter_layer
        x_BSD = decoder.layers[index](
            x_BSD,
            layer=index,
            rotary=(cos, sin),
            mask_B1SP=packed.mask_B1SS,
            prefix=(prefix.k[j], prefix.v[j]) if j >= 0 else None,
            cache=NoCache(),
        )
    layer = decoder.layers[last]
    assert isinstance(layer, Layer)
    attention = layer.attention
    place_N = _places(packed.row_N)
    columns_BA = torch.zeros(len(x_BSD), int(place_N.max()) + 1, dtype=torch.long)
    columns_BA[packed.row_N, place_N] = packed.column_N
    rows_B1 = torch.arange(len(x_BSD)).unsqueeze(1)
    normed_BSD = layer.attention_norm(x_BSD)
    width, num_heads = x_BSD.shape[-1], attention.num_heads
    weight, bias = attention.qkv.weight, attention.qkv.bias
    q_BAD = F.linear(normed_BSD[rows_B1, columns_BA], weight[:width], bias[:width])
    q_BANH = q_BAD.reshape(*columns_BA.shape, num_heads, -1)
    k_v_BS2D = F.linear(normed_BSD, weight[width:], bias[width:])
    k_BSNH, v_BSNH = k_v_BS2D.reshape(*x_BSD.shape[:2], 2, num_heads, -1).unbind(2)
    q_BANH, _ = ATEN.rotate(q_BANH, q_BANH, cos[rows_B1, columns_BA], sin[rows_B1, columns_BA])
    _, k_BSNH = ATEN.rotate(k_BSNH, k_BSNH, cos, sin)
    q_BNAH = q_BANH.transpose(1, 2)
    mask_B1AS = packed.mask_B1SS[rows_B1, 0, columns_BA].unsqueeze(1)
    heads_BNAH = train_attention(q_BNAH, k_BSNH.transpose(1, 2), v_BSNH.transpose(1, 2), mask_B1AS)
    heads_BNAH = heads_BNAH + ATEN.adapter_attention(q_BNAH, prefix.k[-1], prefix.v[-1])
    x_BAD = x_BSD[rows_B1, columns_BA] + attention.out(heads_BNAH.transpose(1, 2).flatten(2))
    x_ND = x_BAD[packed.row_N, place_N]
    states_ND: Tensor = decoder.norm(x_ND + layer.feed_forward(layer.feed_forward_norm(x_ND)))
    return states_ND


def _places(row_N: Tensor) -> Tensor:
    """For each answer token, the number of answer tokens before it in its row; rows are in order."""
    first_B = torch.searchsorted(row_N, torch.arange(int(row_N[-1]) + 1))
    return torch.arange(len(row_N)) - first_B[row_N]


def prepare(decoder: LlamaAdapterDecoder) -> None:
    """Make a decoder use the operators for training."""
    use_operators(decoder, OPERATORS)
