"""A training step of LoRA over one frozen LLaMA: our program, and a plain one with Hugging Face's LLaMA and peft.

Both begin with the same random weights and factors and use the same batch of random tokens. Factors have rank 16 and
scale 1, on all seven matrices of each layer. Our program computes the head only at labelled positions, and computes no
padding.
"""

# B rows, S places

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llama_adapter.app.models.random_model import VOCABULARY, decoder_config, parse_size
from llama_adapter.llm.training.build import Kind, build_decoder, llama_tensors
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.llm.weights.adapter import AdapterFile, lora_names
from llama_adapter.llm.weights.names import (
    MATRICES,
    LlamaSource,
    SplitTensor,
    llama_shapes,
    to_half_split,
    to_huggingface,
)
from scripts.peers.huggingface import llama_config
from scripts.peers.packages import require

LONGEST_PROMPT = 70
ANSWER = (10, 20)  # minimum and maximum, in tokens
Program = Literal["ours", "ours, with pictures", "peft, sdpa", "peft, eager", "peft, eager, factors in bfloat16"]

RANK = 16
NUM_QUERIES = 10
_IGNORED = -100  # Hugging Face's label for positions that do not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Padded rows: tokens and labels int64 (B, S). Padding is 0, and so is every label that does not count."""

    tokens_BS: Tensor
    labels_BS: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return int((self.tokens_BS != 0).sum())

    @property
    def num_labels(self) -> int:
        """The number of labels that count."""
        return int((self.labels_BS[:, 1:] != 0).sum())


Loss = Callable[[Batch], Tensor]  # the mean over labels that count


def random_batch(num_rows: int) -> Batch:
    """A batch with prompts of 60 to 70 tokens and answers of 10 to 20 tokens."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(LONGEST_PROMPT - 10, LONGEST_PROMPT + 1, (num_rows,), generator=random).tolist()
    answers = torch.randint(ANSWER[0], ANSWER[1] + 1, (num_rows,), generator=random).tolist()
    length = max(prompt + answer for prompt, answer in zip(prompts, answers, strict=True))
    tokens_BS, labels_BS = (torch.zeros(num_rows, length, dtype=torch.int64) for _ in range(2))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens_BS[row, : prompt + answer] = torch.randint(3, VOCABULARY, (prompt + answer,), generator=random)
        labels_BS[row, prompt : prompt + answer] = tokens_BS[row, prompt : prompt + answer]
    return Batch(tokens_BS=tokens_BS, labels_BS=labels_BS)


def random_llama(name: str) -> LlamaSource:
    """A LLaMA with the named size, in memory in float32; the rows of q and k are in Hugging Face's order."""
    size = parse_size(name)
    config = dataclasses.replace(decoder_config(size), num_adapter_layers=0, num_queries=0)
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, SplitTensor] = {}
    for key, shape in llama_shapes(config).items():
        is_norm = len(shape) == 1
        values = torch.ones(shape) if is_norm else torch.randn(shape, generator=random) * shape[-1] ** -0.5
        tensors[key] = SplitTensor((values,))
    return LlamaSource(name=f"random {name}", config=config, half_split=True, tensors=tensors, files=())


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
    config = llama.config
    num_layers = config.num_layers - 1 if has_pictures else 0
    queries = torch.randn(num_layers * NUM_QUERIES, config.dim, generator=torch.Generator().manual_seed(1))
    gates = {f"layers.{layer}.attention.gate": torch.zeros(config.num_heads) for layer in range(config.num_layers)}
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
        dataclasses.replace(config, num_adapter_layers=num_layers, num_queries=NUM_QUERIES if has_pictures else 0),
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
        visual_query = torch.zeros(len(batch.tokens_BS), num_queries, config.dim, dtype=dtype)
        total, _ = model(batch.tokens_BS, batch.labels_BS, visual_query)
        mean: Tensor = total / batch.num_labels
        return mean

    return model, loss


def _peft(llama: LlamaSource, *, dtype: torch.dtype, attention: str, has_float_factors: bool) -> tuple[nn.Module, Loss]:
    """`LlamaForCausalLM` under `get_peft_model`. Rows need no attention mask, because padding follows their tokens."""
    transformers = require("transformers", package="transformers")
    peft = require("peft", package="peft")
    settings = llama_config(llama.config, dtype=dtype, attn_implementation=attention)
    base = transformers.LlamaForCausalLM(settings).to(dtype)
    base.load_state_dict({name: value.to(dtype) for name, value in huggingface_state(llama).items()})
    targets = [_module(0, name).rpartition(".")[2] for name in MATRICES]
    lora = peft.LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=targets)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=has_float_factors)
    _copy_factors(model, llama, dtype=dtype)

    def loss(batch: Batch) -> Tensor:
        labels_BS = batch.labels_BS.masked_fill(batch.labels_BS == 0, _IGNORED)
        mean: Tensor = model(input_ids=batch.tokens_BS, labels=labels_BS, use_cache=False).loss
        return mean

    return model, loss


def huggingface_state(llama: LlamaSource) -> dict[str, Tensor]:
    """The state dict of `LlamaForCausalLM`."""
    return {to_huggingface(name): tensor.read() for name, tensor in llama.tensors.items()}


def _module(layer: int, name: str) -> str:
    """Hugging Face's path of a matrix of a layer."""
    return to_huggingface(f"layers.{layer}.{name}.weight").removesuffix(".weight")


@torch.no_grad()
def _copy_factors(model: Any, llama: LlamaSource, *, dtype: torch.dtype) -> None:
    """Set peft's factors to the initial values of ours."""
    ours, _ = _ours(llama, dtype=dtype, has_pictures=False)
    assert isinstance(ours, TrainableDecoder)
    factors: Mapping[str, Tensor] = dict(llama_tensors(ours))
    for layer in range(llama.config.num_layers):
        for name in MATRICES:
            module = model.base_model.model.get_submodule(_module(layer, name))
            l1, l2 = (factors[one] for one in lora_names(f"layers.{layer}.{name}"))
            module.lora_A["default"].weight.copy_(l1)
            module.lora_B["default"].weight.copy_(to_half_split(name, l2, llama.config))
