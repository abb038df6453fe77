"""The arms of the ablation: what each may change, and that the product can hold what each has learned."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from scripts.train_embedded import ablation
from scripts.train_embedded.code_stage import close_gates
from scripts.train_embedded.sizes import build_decoder, build_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, its stages as they are before any training."""
    torch.manual_seed(0)
    folder, encoder = tmp_path_factory.mktemp("run"), build_encoder()
    for stage, part, module in (
        ("vision", "clip", encoder.clip),
        ("slots", "query", encoder.query),
        ("text", "decoder", build_decoder()),
    ):
        torch.save({"modules": {part: module.state_dict()}}, folder / f"{stage}.pt")
    return folder


def _moved(arm: str, folder: Path) -> dict[str, set[str]]:
    """Names of the weights that one large step changes, by half."""
    encoder, decoder = ablation.build_arm(arm, folder)
    halves = {"encoder": encoder, "decoder": decoder}
    before = {half: {name: weight.clone() for name, weight in halves[half].named_parameters()} for half in halves}
    with torch.no_grad():
        decoder.adapter.parametrizations.gates.original.fill_(0.5)  # type: ignore[union-attr, operator]
        before["decoder"]["adapter.parametrizations.gates.original"].fill_(0.5)
    weights = [weight for half in halves.values() for weight in half.parameters() if weight.requires_grad]
    hidden = decoder(*_tokens(), decoder.project_prefix(encoder.query(torch.randn(2, 65, 192))))
    decoder.logits(hidden).square().sum().backward()
    torch.optim.SGD(weights, lr=1.0).step()
    return {
        half: {name for name, weight in halves[half].named_parameters() if not torch.equal(weight, before[half][name])}
        for half in halves
    }


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.arange(12).reshape(2, 6) + 5
    return tokens, torch.arange(6).expand(2, 6), torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)


def test_the_frozen_arm_moves_adapter_norms_and_biases_only(folder: Path) -> None:
    moved = _moved("frozen", folder)
    assert all(name.startswith("query.") for name in moved["encoder"])
    assert {"adapter.queries", "adapter.parametrizations.gates.original", "norm.weight"} <= moved["decoder"]
    assert "layers.0.attention.qkv.bias" in moved["decoder"]
    assert not [
        name
        for name in moved["decoder"]
        if not name.startswith("adapter.") and "norm" not in name and "bias" not in name
    ]


def test_the_opened_arm_moves_all_of_the_llama_and_nothing_of_the_tower(folder: Path) -> None:
    moved = _moved("opened", folder)
    assert all(name.startswith("query.") for name in moved["encoder"])
    assert {"embedding.weight", "head.weight", "layers.3.feed_forward.down.weight"} <= moved["decoder"]


def test_the_lora_arm_leaves_bare_weights_and_the_adapters_own(folder: Path) -> None:
    moved = _moved("lora", folder)["decoder"]
    assert "layers.1.attention.qkv.parametrizations.weight.0.b" in moved
    assert not [name for name in moved if name.endswith("original") and "gates" not in name]
    assert not [name for name in moved if name.startswith("adapter.kv")]


def _hidden(decoder: LlamaAdapterDecoder, visual_query: Tensor) -> Tensor:
    hidden: Tensor = decoder(*_tokens(), decoder.project_prefix(visual_query))
    return hidden


def test_low_rank_additions_start_at_zero_and_merge_exactly(folder: Path) -> None:
    visual_query = torch.randn(2, 10, 192)
    arms = {arm: ablation.build_arm(arm, folder)[1] for arm in ("frozen", "lora")}
    with torch.no_grad():
        for decoder in arms.values():
            decoder.adapter.parametrizations.gates.original.fill_(0.5)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(_hidden(arms["lora"], visual_query), _hidden(arms["frozen"], visual_query))
        for name, weight in arms["lora"].named_parameters():
            if name.endswith(".b"):
                weight.normal_(std=0.1)
        learned = _hidden(arms["lora"], visual_query)
        assert not torch.allclose(learned, _hidden(arms["frozen"], visual_query))
        ablation.merge_lora(arms["lora"])
        close_gates(arms["lora"])
        product = LlamaAdapterDecoder(arms["lora"].config)
        product.load_state_dict(arms["lora"].state_dict())
        torch.testing.assert_close(_hidden(product, visual_query), learned)


@pytest.mark.parametrize("arm", ablation.ARMS)
def test_trained_arm_round_trip(folder: Path, arm: str) -> None:
    encoder, decoder = ablation.build_arm(arm, folder)
    with torch.no_grad():
        for weight in [*encoder.query.parameters(), *decoder.parameters()]:
            if weight.requires_grad:
                weight += 0.05 * torch.randn_like(weight)
    modules = {"query": encoder.query.state_dict(), "decoder": decoder.state_dict()}
    torch.save({"modules": modules}, folder / f"ablation-{arm}.pt")

    read_encoder, read_decoder = ablation.load_arm(arm, folder)

    features = torch.randn(2, 65, 192)
    with torch.no_grad():
        queries, read = encoder.query(features), read_encoder.query(features)
        assert torch.equal(read, queries)
        torch.testing.assert_close(_hidden(read_decoder, read), _hidden(decoder, queries))
    close_gates(read_decoder)
    product = LlamaAdapterDecoder(read_decoder.config)
    product.load_state_dict(read_decoder.state_dict())


def test_weights_are_counted_by_what_they_are(folder: Path) -> None:
    counts = {arm: ablation.count_weights(*ablation.build_arm(arm, folder)) for arm in ablation.ARMS}
    assert counts["frozen"]["adapter"] == 3 * 10 * 192 + 3 * 6
    assert counts["frozen"]["norms"] == 9 * 192
    assert counts["frozen"]["biases"] == 4 * (192 + 192 + 2 * 512 + 192)  # none of keys and values
    assert (counts["frozen"]["llama"], counts["frozen"].get("lora", 0)) == (0, 0)
    assert counts["lora"]["lora"] == 4 * 16 * (6 * 192 + (192 + 192) + (2 * 192 + 2 * 512) + (512 + 192))
    assert counts["opened"]["all_trained"] == counts["frozen"]["all_trained"] + counts["opened"]["llama"]
    assert counts["opened"]["all"] == counts["frozen"]["all"]


def test_an_unknown_arm_is_named(folder: Path) -> None:
    with pytest.raises(KeyError, match="no arm 'thawed'"):
        ablation.build_arm("thawed", folder)
