"""The decoder in training, for every family: its loss and gradients are those of the decoder that answers."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.training.attention import attend, attend_fused
from llama_adapter.llm.training.build import DECODER_KINDS, build_decoder, llama_tensors
from llama_adapter.llm.training.decoder import TrainableDecoder
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.llm.training.layout import IGNORED
from llama_adapter.llm.weights.adapter import AdapterFile, lora_names
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.names import BIASED, LlamaSource, SplitTensor, llama_shapes, matrix_shapes, norm_shapes
from tests.bounds import difference, largest
from tests.llm.toys import CONFIG, FAMILIES, toy_visual_queries

CONFIGS = {"llama": CONFIG, **FAMILIES}
RANK = 2
NO_ADAPTER = "layers.0.attention.gate"  # of a layer without adapter: not used
Random = torch.Generator


def drawn(shape: tuple[int, ...], random: Random) -> Tensor:
    """Weights of which products have about the size of their inputs; norms are around 1, biases around 0."""
    values = torch.randn(shape, generator=random)
    return values * shape[-1] ** -0.5 if len(shape) > 1 else 0.2 * values


def toy_source(config: DecoderConfig, random: Random) -> LlamaSource:
    """A base model whose q, k and v have biases."""
    plain = dataclasses.replace(config, num_adapter_layers=0, num_queries=0)
    shapes = llama_shapes(plain, biased=("attention.wq", "attention.wk", "attention.wv"))
    tensors = {name: drawn(shape, random) + ("norm" in name) for name, shape in shapes.items()}
    split = {name: SplitTensor((tensor,)) for name, tensor in tensors.items()}
    return LlamaSource(name="toy", config=plain, half_split=True, tensors=split, files=())


def toy_adapter(config: DecoderConfig, random: Random, *, has_lora: bool) -> AdapterFile:
    """An adapter with open gates, biases and norms; with LoRA, its factors are not 0."""
    found: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        found[f"{prefix}attention.gate"] = drawn((config.num_heads,), random).reshape(1, -1, 1, 1) * 5
        for name, (rows, columns) in matrix_shapes(config).items():
            if name in BIASED:
                found[f"{prefix}{name}.bias"] = drawn((rows,), random)
            if has_lora:
                shapes = (RANK, columns), (rows, RANK)
                found |= zip(lora_names(prefix + name), (drawn(shape, random) for shape in shapes), strict=True)
        found |= {f"{prefix}{name}.weight": drawn(shape, random) + 1 for name, shape in norm_shapes(config).items()}
    found["norm.weight"] = drawn((config.dim,), random) + 1
    num_queries = config.num_adapter_layers * config.num_queries
    return AdapterFile(
        name="toy adapter",
        queries=drawn((num_queries, config.dim), random),
        visual={"visual_query.weight": torch.zeros(config.num_queries, config.dim)},
        llama=found,
        clip={},
        declares={},
    )


def batch(config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels of ragged rows, longer than the windows, and pictures."""
    tokens = torch.randint(3, config.vocab_size, (3, 24), generator=torch.Generator().manual_seed(2))
    labels = tokens.clone()
    labels[:, :4], labels[1, 17:], labels[2, 9:] = IGNORED, IGNORED, IGNORED
    return tokens, labels, toy_visual_queries(3, config=config)


def losses_of_answers(
    decoder: LlamaAdapterDecoder, state: Mapping[str, Tensor], tokens: Tensor, labels: Tensor, queries: Tensor
) -> Tensor:
    """The loss of the decoder that answers, with plain operators. Torch computes its gradients."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()

    class Answering(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def forward(self) -> Tensor:
            prefix = decoder.project_prefix(queries)
            logits: Tensor = decoder.logits(decoder(tokens, torch.arange(length)[None], mask, prefix))
            return logits

    logits = torch.func.functional_call(Answering(), {f"decoder.{name}": one for name, one in state.items()}, ())
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def gradients_in_the_file(trainable: TrainableDecoder) -> dict[str, Tensor]:
    """The gradients under the names of the adapter's file, by writing them in place of the weights."""
    decoder = trainable.decoder
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.requires_grad:
                assert weight.grad is not None
                weight.copy_(weight.grad)
        return {**dict(llama_tensors(trainable)), "queries": decoder.adapter.queries.detach().flatten(0, 1)}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("has_lora", [False, True], ids=["bias", "lora"])
def test_loss_and_gradients_are_those_of_the_decoder_that_answers(family: str, has_lora: bool) -> None:
    config, random = CONFIGS[family], torch.Generator().manual_seed(3)
    source, adapter = toy_source(config, random), toy_adapter(config, random, has_lora=has_lora)
    planned = plan_decoder(source, adapter, vocab_size=config.vocab_size, context=config.context)
    tokens, labels, queries = batch(config)

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in adapter.llama.items()}
    leaf_queries = adapter.queries.clone().requires_grad_()
    differentiable = dataclasses.replace(adapter, llama=leaves, queries=leaf_queries)
    state = dict(decoder_tensors(planned, source=source, adapter=differentiable, dtype=torch.float32))
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(planned)
    wanted = losses_of_answers(decoder, state, tokens, labels, queries)
    wanted.backward()
    expected = {**leaves, "queries": leaf_queries}

    left_out = {"output head"} if has_lora else {"output head", "LoRA factors"}
    trained = [kind for kind in DECODER_KINDS if kind not in left_out]
    for kernels in (None, find_kernels("cpu", torch.float32)):
        for attention in (attend, attend_fused) if kernels is None and not config.score_cap else (attend,):
            trainable = build_decoder(
                planned,
                source=source,
                adapter=adapter,
                trained=trained,
                lora_rank=RANK,
                dtype=torch.float32,
                device="cpu",
                seed=0,
                kernels=kernels,
            )
            trainable.attend = attention
            written = dict(llama_tensors(trainable))
            assert written.keys() == adapter.llama.keys()
            for name, one in adapter.llama.items():
                if name != NO_ADAPTER:
                    assert torch.equal(written[name].flatten(), one.flatten()), name

            loss, _ = trainable(tokens, labels, queries)
            loss.backward()

            assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
            found = gradients_in_the_file(trainable)
            for name, leaf in expected.items():
                layer_has_no_adapter = leaf.grad is None
                grad = torch.zeros_like(leaf) if layer_has_no_adapter else leaf.grad
                assert grad is not None
                assert layer_has_no_adapter == (name == NO_ADAPTER)
                assert difference(found[name].reshape(grad.shape), grad) <= 2e-5 * max(largest(grad), 1.0), name
