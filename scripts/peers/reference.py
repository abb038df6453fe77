"""A loop like the reference implementation's: plain linear layers, whole batches until the last row ends.

Norms, rotations and softmax are float32 in every type, as there. It gives the same answers as our engine. It repeats
work: the adapter's keys and values at every step, rows whose caption has ended, and the logits of every prompt token.
"""

# B rows, S step tokens, P positions, Q adapter queries, N heads, H head size, D model width, V vocabulary

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.rotary import Rotary
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.devices import Backend
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.common import sample_files
from scripts.peers.ours import JobResult
from scripts.peers.sizes import prompt_ids


class ReferenceLoop:
    """The decoder over one of our state dicts, in its type and on its device, with a cache of `num_rows` rows."""

    def __init__(self, state: Mapping[str, Tensor], config: DecoderConfig, *, num_rows: int) -> None:
        self._state, self._config = state, config
        head = state["head.weight"]
        self._device = head.device
        shape = (config.num_layers, num_rows, config.context, config.num_heads, config.head_dim)
        self._k_LBPNH, self._v_LBPNH = head.new_zeros(shape), head.new_zeros(shape)
        table = Rotary(theta=config.rope_theta).table(config.head_dim, context=config.context)
        self._cos_PH, self._sin_PH = (torch.from_numpy(part).to(self._device) for part in table)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], visual_query_BQD: Tensor, *, num_new_tokens: int
    ) -> list[list[int]]:
        """New greedy tokens of each row: `num_new_tokens` for the longest prompt; no row stops earlier."""
        total = max(map(len, prompts)) + num_new_tokens
        tokens_BP = torch.zeros(len(prompts), total, dtype=torch.int64)
        is_prompt_BP = torch.zeros(len(prompts), total, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            tokens_BP[row, : len(prompt)] = torch.tensor(prompt)
            is_prompt_BP[row, : len(prompt)] = True
        tokens_BP, is_prompt_BP = tokens_BP.to(self._device), is_prompt_BP.to(self._device)
        previous = 0
        for position in range(min(map(len, prompts)), total):
            logits_BV = self.forward(tokens_BP[:, previous:position], visual_query_BQD, start=previous)
            chosen_B = logits_BV.argmax(dim=-1)
            tokens_BP[:, position] = torch.where(is_prompt_BP[:, position], tokens_BP[:, position], chosen_B)
            previous = position
        rows: list[list[int]] = tokens_BP.tolist()
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]

    def forward(self, tokens_BS: Tensor, visual_query_BQD: Tensor, *, start: int) -> Tensor:
        """Logits (B, V) after the last of the tokens at positions start, start + 1, ..."""
        config, state = self._config, self._state
        x_BSD = F.embedding(tokens_BS, state["embedding.weight"])
        num_tokens = tokens_BS.shape[1]
        mask_SP = torch.full((num_tokens, start + num_tokens), float("-inf"), device=self._device).triu(start + 1)
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            normed_BSD = self._norm(x_BSD, f"{name}.attention_norm.weight")
            x_BSD = x_BSD + self._attention(layer, normed_BSD, visual_query_BQD, mask_SP=mask_SP, start=start)
            normed_BSD = self._norm(x_BSD, f"{name}.feed_forward_norm.weight")
            x_BSD = x_BSD + self._feed_forward(f"{name}.feed_forward", normed_BSD)
        logits_BV: Tensor = F.linear(self._norm(x_BSD, "norm.weight")[:, -1], state["head.weight"])
        return logits_BV

    def _attention(self, layer: int, x_BSD: Tensor, visual_query_BQD: Tensor, *, mask_SP: Tensor, start: int) -> Tensor:
        state, name = self._state, f"layers.{layer}.attention"
        q_weight, k_weight, v_weight = state[f"{name}.qkv.weight"].chunk(3)
        q_bias, k_bias, v_bias = state[f"{name}.qkv.bias"].chunk(3)
        q_BSNH = self._turned(self._heads(F.linear(x_BSD, q_weight, q_bias)), start=start)
        k_BSNH = self._turned(self._heads(F.linear(x_BSD, k_weight, k_bias)), start=start)
        num_rows, end = len(x_BSD), start + x_BSD.shape[1]
        self._k_LBPNH[layer, :num_rows, start:end] = k_BSNH
        self._v_LBPNH[layer, :num_rows, start:end] = self._heads(F.linear(x_BSD, v_weight, v_bias))
        q_BNSH = q_BSNH.transpose(1, 2)
        k_BNPH = self._k_LBPNH[layer, :num_rows, :end].transpose(1, 2)
        v_BNPH = self._v_LBPNH[layer, :num_rows, :end].transpose(1, 2)
        scores_BNSP = q_BNSH @ k_BNPH.transpose(2, 3) / self._config.head_dim**0.5 + mask_SP
        out_BNSH = F.softmax(scores_BNSP.float(), dim=-1).type_as(x_BSD) @ v_BNPH
        if layer >= self._config.first_adapter_layer:
            out_BNSH = out_BNSH + self._adapter(layer, q_BNSH, visual_query_BQD, weights=(k_weight, v_weight))
        return F.linear(out_BNSH.transpose(1, 2).flatten(2), state[f"{name}.out.weight"], state[f"{name}.out.bias"])

    def _adapter(
        self, layer: int, q_BNSH: Tensor, visual_query_BQD: Tensor, *, weights: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The adapter's part of the attention; its keys and values are computed at every call."""
        index = layer - self._config.first_adapter_layer
        tokens_BQD = self._state["adapter.queries"][index] + visual_query_BQD
        k_weight, v_weight = weights
        k_BNQH = self._heads(F.linear(tokens_BQD, k_weight)).transpose(1, 2)
        v_BNQH = self._heads(F.linear(tokens_BQD, v_weight)).transpose(1, 2)
        scores_BNSQ = q_BNSH @ k_BNQH.transpose(2, 3) / self._config.head_dim**0.5
        gate_N11 = self._state["adapter.gates"][index][:, None, None]
        term_BNSH: Tensor = (gate_N11 * F.softmax(scores_BNSQ.float(), dim=-1).type_as(q_BNSH)) @ v_BNQH
        return term_BNSH

    def _feed_forward(self, name: str, x_BSD: Tensor) -> Tensor:
        state = self._state
        gate_weight, up_weight = state[f"{name}.gate_up.weight"].chunk(2)
        gate_bias, up_bias = state[f"{name}.gate_up.bias"].chunk(2)
        hidden = F.silu(F.linear(x_BSD, gate_weight, gate_bias)) * F.linear(x_BSD, up_weight, up_bias)
        return F.linear(hidden, state[f"{name}.down.weight"], state[f"{name}.down.bias"])

    def _norm(self, x_BSD: Tensor, name: str) -> Tensor:
        wide_BSD = x_BSD.float()
        scale = torch.rsqrt(wide_BSD.pow(2).mean(-1, keepdim=True) + self._config.norm_eps)
        return (wide_BSD * scale).type_as(x_BSD) * self._state[name]

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.view(*x_BSD.shape[:2], self._config.num_heads, -1)

    def _turned(self, x_BSNH: Tensor, *, start: int) -> Tensor:
        places = slice(start, start + x_BSNH.shape[1])
        cos_S1H, sin_S1H = self._cos_PH[places, None], self._sin_PH[places, None]
        first, second = x_BSNH.float().chunk(2, dim=-1)
        return (x_BSNH * cos_S1H + torch.cat([-second, first], dim=-1) * sin_S1H).type_as(x_BSNH)


class ReferenceJob:
    """The caption job: pictures are read one after another, and a batch runs to the end of its longest caption."""

    def __init__(
        self,
        decoder: DecoderConfig,
        vision: VisionConfig,
        *,
        decoder_state: Mapping[str, Tensor],
        encoder_state: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        num_rows: int,
        backend: Backend,
    ) -> None:
        """The states are on the backend's device, both in one type."""
        self._backend, self.num_slots = backend, num_rows
        self._encoder = encoder_from_state(vision, encoder_state).to(backend.device)
        self._pixels = vision.clip.pixels
        self._loop = ReferenceLoop(decoder_state, decoder, num_rows=num_rows)
        self._tokenizer = tokenizer

    @torch.inference_mode()
    def run(self, ends: Sequence[int]) -> JobResult:
        """Caption as many pictures as `ends`; tokens beyond the end of a caption are dropped."""
        started = time.perf_counter()
        files = map(str, sample_files(len(ends)))
        pixels = [preprocess(load_picture(file).image, rule=self._pixels) for file in files]
        read = time.perf_counter()
        visual_query_BQD = self._encoder(torch.from_numpy(np.stack(pixels)).to(self._backend.device))
        self._backend.synchronise()
        encoded = time.perf_counter()
        prompts = [prompt_ids(row) for row in range(len(ends))]
        rows = self._loop.generate(prompts, visual_query_BQD, num_new_tokens=max(ends))
        token_ids = tuple(tuple(row[:end]) for row, end in zip(rows, ends, strict=True))
        for row in token_ids:
            self._tokenizer.decode(row)
        ended = time.perf_counter()
        return JobResult(
            seconds=ended - started,
            stages_s={"read": read - started, "clip": encoded - read, "forward": ended - encoded},
            token_ids=token_ids,
        )
