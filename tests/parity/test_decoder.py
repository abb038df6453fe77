"""The decoder and the engine compared with the reference: hidden states, logits, token ids, loss and gradients."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.names import half_split
from tests.bounds import FACTOR, Float64, difference, largest, spread
from tests.llm.toys import forward
from tests.parity.golden import (
    CASES,
    GENERATE,
    GOLDEN,
    GoldenModel,
    decoder_state,
    exact_model,
    measured_model,
    model,
    pixels,
    tensors,
)

WITH_STEPS = [name for name, case in GENERATE.items() if case["steps"]]


def meta_order(rows: Tensor, *, num_heads: int = 4) -> Tensor:
    """Undo the half-split order of the last axis of queries or keys."""
    head_dim = rows.shape[-1] // num_heads
    return rows.unflatten(-1, (num_heads, 2, head_dim // 2)).transpose(-1, -2).flatten(-3)


def states_of(parts: GoldenModel, tokens: Tensor) -> dict[str, Tensor]:
    """What each part of the decoder makes of the tokens and a picture."""
    encoder, decoder = parts
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: seen.update({name: output})

    hooks = [
        decoder.embedding.register_forward_hook(keep("embedding")),
        decoder.norm.register_forward_hook(keep("final_norm")),
    ]
    for index, layer in enumerate(decoder.layers):
        hooks.append(layer.register_forward_hook(keep(f"layer_{index}")))
        hooks.append(
            layer.attention.out.register_forward_pre_hook(
                lambda _module, inputs, name=f"layer_{index}.heads": seen.update({name: inputs[0]})
            )
        )
    prefix = decoder.project_prefix(encoder(pixels(["shapes_200x300.jpg"])))
    hidden = forward(decoder, tokens, prefix)
    seen["logits"] = decoder.logits(hidden[:, -1])
    for hook in hooks:
        hook.remove()
    # Keys of the first adapter layer, and its values with the gate divided out.
    seen["layer_1.adapter_k"] = meta_order(prefix.k[0].transpose(1, 2).flatten(2))
    gates = decoder.adapter.gates[0][None, :, None, None]
    seen["layer_1.adapter_v"] = (prefix.v[0] / gates).transpose(1, 2).flatten(2)
    return seen


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_hidden_states_of_every_layer_equal_the_reference(adapter: str) -> None:
    golden = tensors(f"hidden_{adapter}")
    ours = states_of(model(adapter), golden["tokens"])
    with Float64():
        exact = states_of(exact_model(adapter), golden["tokens"])
    for name in sorted(set(golden) - {"tokens", "layer_1.adapter_input"}):
        assert difference(ours[name], golden[name]) <= spread(ours[name], exact[name]), name


def logits_along(case: dict[str, Any], parts: GoldenModel, *, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Our logits and the reference's for every model call, fed with the reference's tokens, row by row."""
    golden = tensors(case["file"].removeprefix("data/").removesuffix(".safetensors"))
    encoder, decoder = parts
    prefix = decoder.project_prefix(encoder(pixels(case["images"]).to(device)))
    pairs = []
    for row, tokens in enumerate(golden["tokens"]):
        known = int((tokens >= 0).sum())
        length = min(known, case["first_chunk_len"] + case["steps"] - 1)
        row_prefix = Prefix(prefix.k[:, row : row + 1], prefix.v[:, row : row + 1])
        hidden = forward(decoder, tokens[None, :length].to(device), row_prefix)
        ours = decoder.logits(hidden)[0, case["first_chunk_len"] - 1 :].cpu()
        pairs.append((ours, golden["logits"][row, : len(ours)]))
    return pairs


@functools.cache
def logits_limit(name: str, *, dtype: torch.dtype = torch.float32) -> float:
    """How far apart the logits of a case may be by two programs in `dtype`."""
    case = GENERATE[name]
    measured = logits_along(case, measured_model(case["adapter"], dtype=dtype))
    with Float64():
        exact = logits_along(case, exact_model(case["adapter"]))
    return max(spread(ours, wanted) for (ours, _), (wanted, _) in zip(measured, exact, strict=True))


@pytest.mark.parametrize("name", WITH_STEPS)
def test_logits_of_every_step_equal_the_reference_and_no_rounding_changes_its_tokens(name: str) -> None:
    """So equal token ids may be asked of any processor."""
    for ours, golden in logits_along(GENERATE[name], model(GENERATE[name]["adapter"])):
        assert difference(ours, golden) <= logits_limit(name)
        first, second = golden.topk(2).values.unbind(-1)
        assert float((first - second).min()) > 2 * logits_limit(name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bias_b3_mixed", "lora_b3_mixed"])
@pytest.mark.proves("bfloat16", "CPU")
@pytest.mark.proves("float16", "CPU")
def test_half_precision_logits_stay_near_the_reference(name: str, dtype: torch.dtype) -> None:
    for ours, golden in logits_along(GENERATE[name], model(GENERATE[name]["adapter"], dtype=dtype)):
        assert ours.dtype == torch.float32
        assert difference(ours, golden) <= logits_limit(name, dtype=dtype)


def test_llama_alone_equals_the_reference() -> None:
    golden = tensors("plain_llama")
    decoder = decoder_from_state(*decoder_state(adapter=None))
    tokens, nothing = golden["tokens"], torch.zeros(len(golden["tokens"]), 0, 64)
    ours = decoder.logits(forward(decoder, tokens, decoder.project_prefix(nothing)))
    with Float64():
        decoder = decoder.double()
        exact = decoder.logits(forward(decoder, tokens, decoder.project_prefix(nothing.double())))
    assert difference(ours[:, -1], golden["logits_last"]) <= spread(ours, exact)


def loss_and_gradients(adapter: str, parts: GoldenModel) -> dict[str, Tensor]:
    """Loss, logits of the first row, and gradients by the reference's names."""
    golden = tensors(f"loss_{adapter}")
    case = next(case for case in CASES["loss"] if case["name"] == adapter)
    encoder, decoder = parts
    for half in (encoder, decoder):
        half.requires_grad_(True)
        half.zero_grad()
    try:
        prefix = decoder.project_prefix(encoder(pixels(case["images"])))
        logits = decoder.logits(forward(decoder, golden["tokens"], prefix))
        # Logits at t are compared with labels at t + 1; labels of 0 do not count.
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), golden["labels"][:, 1:].flatten(), ignore_index=0)
        loss.backward()
    finally:
        for half in (encoder, decoder):
            half.requires_grad_(False)
    gradients = reference_gradients(adapter, encoder, decoder)
    return {"loss": loss, "logits_row0": logits[0]} | {f"grad/{name}": one for name, one in gradients.items()}


@functools.cache
def loss_limits(adapter: str) -> dict[str, float]:
    """How far apart the results of `loss_and_gradients` by two programs may be.

    Some gradients are few numbers, so all share the largest relative difference.
    """
    ours = loss_and_gradients(adapter, model(adapter))
    with Float64():
        exact = loss_and_gradients(adapter, exact_model(adapter))
    logits = spread(ours["logits_row0"], exact["logits_row0"])
    limits = {"logits_row0": logits, "loss": 2 * logits}
    names = exact.keys() - limits.keys()
    share = FACTOR * max(difference(ours[name], exact[name]) / largest(exact[name]) for name in names)
    return limits | {name: share * largest(exact[name]) for name in names}


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_loss_and_gradients_equal_the_reference(adapter: str) -> None:
    golden, ours = tensors(f"loss_{adapter}"), loss_and_gradients(adapter, model(adapter))
    compared = {"loss", "logits_row0"} & golden.keys() | {name for name in golden if name.startswith("grad/")}
    assert len(compared) >= 11
    for name in sorted(compared):
        assert difference(ours[name].reshape(golden[name].shape), golden[name]) <= loss_limits(adapter)[name], name


def reference_gradients(adapter: str, encoder: Any, decoder: Any) -> dict[str, Tensor]:
    """Our gradients under the reference's names: rows in Meta's order, and folded or merged weights separated again."""
    source = open_adapter(GOLDEN / "adapters" / f"{adapter}.pth").llama
    to_meta = half_split(torch.arange(64)[:, None], 4)[:, 0].argsort()
    found = {
        "adapter_query.weight": decoder.adapter.queries.grad.flatten(0, 1),
        "visual_query.weight": encoder.query.queries.grad,
        "clip_proj_norm.weight": encoder.query.input_norm.weight.grad,
        "visual_proj.bias": encoder.query.output_projection.bias.grad,
        "llama.norm.weight": decoder.norm.weight.grad,
    }
    for index, layer in enumerate(decoder.layers):
        name = f"llama.layers.{index}."
        found[f"{name}feed_forward.w2.bias"] = layer.feed_forward.down.bias.grad
        found[f"{name}ffn_norm.weight"] = layer.feed_forward_norm.weight.grad
        found[f"{name}attention.wq.bias"] = layer.attention.qkv.bias.grad[:64][to_meta]
        if index < decoder.config.first_adapter_layer:
            continue
        gate = source[f"layers.{index}.attention.gate"].float().flatten()
        new_gate = source.get(f"layers.{index}.attention.new_gate", torch.ones(1)).float()
        folded = decoder.adapter.gates.grad[index - decoder.config.first_adapter_layer]
        found[f"{name}attention.gate"] = folded * new_gate.flatten() * (1 - gate.tanh() ** 2)
        found[f"{name}attention.new_gate"] = (folded * gate.tanh()).sum()
        l1, l2 = (source.get(f"layers.{index}.attention.lora_wk_l{half}.weight") for half in (1, 2))
        if l1 is not None and l2 is not None:
            merged = layer.attention.qkv.weight.grad[64:128][to_meta]
            found[f"{name}attention.lora_wk_l2.weight"] = merged @ l1.float().T
            found[f"{name}attention.lora_wk_l1.weight"] = l2.float().T @ merged
    return found
