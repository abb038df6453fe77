"""A training step of LoRA over one frozen LLaMA: our program, and a plain one with Hugging Face's LLaMA and peft.

Both begin with the same weights and factors and use the same batch. Factors have rank 16 and scale 1, on all seven
matrices of each layer. Our program computes the head only at labelled positions, and computes no padding.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.training.build import Kind, build_decoder, llama_tensors
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.llm.weights.adapter import AdapterFile, lora_names
from llama_adapter.llm.weights.names import MATRICES, LlamaSource, half_split
from scripts.peers.huggingface import llama_config
from scripts.peers.packages import require
from scripts.training_bench.batch import Batch

Program = Literal["ours", "ours, with pictures", "peft, sdpa", "peft, eager", "peft, eager, factors in bfloat16"]
Loss = Callable[[Batch], Tensor]  # the mean over labels that count

RANK = 16
NUM_QUERIES = 10
_IGNORED = -100  # Hugging Face's label for positions that do not count
_MODULES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def open_program(program: Program, llama: LlamaSource, *, dtype: torch.dtype) -> tuple[nn.Module, Loss]:
    """The program's model and its loss. Raises MissingPackage without peft."""
    if program.startswith("ours"):
        return _ours(llama, dtype=dtype, has_pictures=program == "ours, with pictures")
    return _peft(
        llama,
        dtype=dtype,
        attention="sdpa" if program == "peft, sdpa" else "eager",
        has_float_factors="factors in bfloat16" not in program,
    )


def _ours(llama: LlamaSource, *, dtype: torch.dtype, has_pictures: bool) -> tuple[nn.Module, Loss]:
    """Our `TrainableDecoder`.

    With pictures it trains `bias` and `lora`, and all layers but one attend to ten visual tokens.
    """
    num_layers = llama.num_layers - 1 if has_pictures else 0
    queries = torch.randn(num_layers * NUM_QUERIES, llama.dim, generator=torch.Generator().manual_seed(1))
    gates = {f"layers.{layer}.attention.gate": torch.zeros(llama.num_heads) for layer in range(llama.num_layers)}
    visual = {"visual_query.weight": torch.zeros(NUM_QUERIES, 1)} if has_pictures else {}
    adapter = AdapterFile(
        name="the benchmark's adapter",
        queries=queries,
        visual=visual,
        llama=gates if has_pictures else {},
        clip={},
        declares={},
        is_chat=not has_pictures,
    )
    trained: set[Kind] = {"LoRA factors"}
    if has_pictures:
        trained |= {"queries", "gates", "norms", "biases"}
    model = build_decoder(
        _config(llama, num_adapter_layers=num_layers),
        source=llama,
        adapter=adapter,
        trained=trained,
        lora_rank=RANK,
        dtype=dtype,
        device="cpu",
        seed=0,
        kernels=find_kernels("cpu", dtype),
    )
    num_queries = NUM_QUERIES if has_pictures else 0

    def loss(batch: Batch) -> Tensor:
        visual_query = torch.zeros(len(batch.tokens_BS), num_queries, llama.dim, dtype=dtype)
        total, _ = model(batch.tokens_BS, batch.labels_BS, visual_query)
        mean: Tensor = total / batch.num_labels
        return mean

    return model, loss


def _config(llama: LlamaSource, *, num_adapter_layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=llama.vocab_size,
        dim=llama.dim,
        num_layers=llama.num_layers,
        num_heads=llama.num_heads,
        ffn_dim=llama.ffn_dim,
        norm_eps=llama.norm_eps,
        num_adapter_layers=num_adapter_layers,
        num_queries=NUM_QUERIES if num_adapter_layers else 0,
    )


def _peft(llama: LlamaSource, *, dtype: torch.dtype, attention: str, has_float_factors: bool) -> tuple[nn.Module, Loss]:
    """`LlamaForCausalLM` under `get_peft_model`. Rows need no attention mask, because padding follows their tokens."""
    transformers = require("transformers", package="transformers")
    peft = require("peft", package="peft")
    settings = llama_config(_config(llama, num_adapter_layers=0), dtype=dtype, attn_implementation=attention)
    base = transformers.LlamaForCausalLM(settings).to(dtype)
    base.load_state_dict({name: value.to(dtype) for name, value in _base_state(llama).items()})
    targets = [name.rpartition(".")[2] for name in _MODULES.values()]
    lora = peft.LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=targets)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=has_float_factors)
    _copy_factors(model, llama, dtype=dtype)

    def loss(batch: Batch) -> Tensor:
        labels_BS = batch.labels_BS.masked_fill(batch.labels_BS == 0, _IGNORED)
        mean: Tensor = model(input_ids=batch.tokens_BS, labels=labels_BS, use_cache=False).loss
        return mean

    return model, loss


def _base_state(llama: LlamaSource) -> dict[str, Tensor]:
    tops = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }
    state = {theirs: llama.tensors[ours].read() for theirs, ours in tops.items()}
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(llama.num_layers):
        for ours, theirs in [*_MODULES.items(), *((ours, theirs) for theirs, ours in norms.items())]:
            state[f"model.layers.{layer}.{theirs}.weight"] = llama.tensors[f"layers.{layer}.{ours}.weight"].read()
    return state


@torch.no_grad()
def _copy_factors(model: Any, llama: LlamaSource, *, dtype: torch.dtype) -> None:
    """Set peft's factors to the initial values of ours."""
    ours, _ = _ours(llama, dtype=dtype, has_pictures=False)
    assert isinstance(ours, TrainableDecoder)
    factors: Mapping[str, Tensor] = dict(llama_tensors(ours))
    for layer in range(llama.num_layers):
        for name in MATRICES:
            module = model.base_model.model.model.layers[layer].get_submodule(_MODULES[name])
            l1, l2 = (factors[one] for one in lora_names(f"layers.{layer}.{name}"))
            module.lora_A["default"].weight.copy_(l1)
            is_rotated = name in ("attention.wq", "attention.wk")
            module.lora_B["default"].weight.copy_(half_split(l2, llama.num_heads) if is_rotated else l2)
