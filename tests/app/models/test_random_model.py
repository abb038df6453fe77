"""Models with random weights: their sizes, their values, and the text that they give."""

import pytest
import torch

from llama_adapter.app.models.random_model import (
    LLAMA_SIZES,
    LlamaSize,
    RandomLoader,
    WiderTokenizer,
    decoder_config,
    parse_size,
    random_model,
    random_tensors,
    vision_config,
)
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.roofline import decoder_weights, encoder_weights
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.split import take
from llama_adapter.llm.tokenizer import IncrementalDetokenizer, Tokenizer
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.schemes import PRECISIONS, Precision
from llama_adapter.vision.encoder import encoder_from_state
from tests.app.models.bundles import assert_same
from tests.llm.test_split import Place


@pytest.mark.parametrize(
    ("name", "millions"), [("160M", 162), ("1B", 1261), ("7B", 6738), ("13B", 13015), ("30B", 32528), ("65B", 65284)]
)
def test_a_size_has_as_many_weights_as_it_is_named_after(name: str, millions: int) -> None:
    config = decoder_config(parse_size(name))

    assert decoder_weights(config) // 10**6 == millions
    assert config.num_adapter_layers == config.num_layers - 1


# The numbers are those of the published models' pages on Hugging Face; `tied` ones have one tensor for embedding and
# head there. Qwen's biases of q, k and v are counted there too.
@pytest.mark.parametrize(
    ("name", "published", "tied"),
    [
        ("SmolLM2-135M", 134_515_008, True),
        ("SmolLM2-360M", 361_821_120, True),
        ("Qwen2.5-0.5B", 494_032_768 - 24 * (896 + 2 * 128), True),
        ("TinyLlama", 1_100_048_384, False),
        ("Llama-3.2-1B", 1_235_814_400, True),
        ("Llama-3.2-3B", 3_212_749_824, True),
        ("Llama-3.1-8B", 8_030_261_248, False),
    ],
)
def test_a_model_of_today_has_as_many_weights_as_the_published_one(name: str, published: int, tied: bool) -> None:
    config = decoder_config(parse_size(name))
    norms = config.dim * (2 * config.num_layers + 1)

    assert decoder_weights(config) + norms == published + tied * config.vocab_size * config.dim


def test_the_encoder_is_vit_l_14_with_the_released_visual_blocks() -> None:
    config = vision_config(LLAMA_SIZES["7B"])
    clip, query = config.clip, config.query

    assert (clip.width, clip.num_layers, clip.num_heads, clip.patch_size, clip.output_dim) == (1024, 24, 16, 14, 768)
    assert (query.width, query.depth, query.num_heads, query.num_queries) == (768, 8, 16, 10)
    assert encoder_weights(config) // 10**6 == 363


def test_a_size_can_be_given_by_its_numbers_and_an_unknown_one_is_refused() -> None:
    assert parse_size("2048x22x16x5632") == parse_size("1b") == LLAMA_SIZES["1B"]
    assert parse_size("32x2x2x64") == LlamaSize(dim=32, num_layers=2, num_heads=2, ffn_dim=64)
    for text in ("", "14B", "32x2x2", "32x2x2x64x1", "32x-2x2x64"):
        with pytest.raises(ValueError, match=r"160M, 1B, 7B, .*Llama-3.1-8B, or DIMxLAYERSxHEADSxFFN"):
            parse_size(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_fit_the_modules_and_keep_activations_sane(dtype: torch.dtype) -> None:
    model = random_model("tiny", dtype=dtype)
    decoder = decoder_from_state(model.decoder_config, model.decoder_state)
    encoder = encoder_from_state(model.vision_config, model.vision_state)
    tensors = [*model.decoder_state.values(), *model.vision_state.values()]

    visual = encoder(torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8))
    hidden = decoder(
        torch.tensor([[1, 5, 9]] * 2),
        torch.arange(3)[None],
        torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(),
        decoder.project_prefix(visual),
    )

    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert 0.1 < float(visual.float().std()) < 10
    assert 0.1 < float(decoder.logits(hidden).std()) < 10


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rank_has_its_part_of_the_model_that_all_draw(precision: Precision) -> None:
    loader = RandomLoader(name="tiny", precision=precision)
    model, tensors = loader(torch.float32)
    whole, share = dict(tensors), model.decoder_config.share(1, 2)

    part = dict(loader(torch.float32, Place(1, 2))[1])

    wanted = {name: take(name, tensor, whole=model.decoder_config, share=share) for name, tensor in whole.items()}
    assert_same(part, wanted)


def test_a_tensor_larger_than_the_drawn_numbers_repeats_them() -> None:
    sketch = {"head.weight": torch.empty(1100, 1000, device="meta")}

    values = dict(random_tensors(sketch, dtype=torch.float32))["head.weight"].view(-1)

    assert torch.equal(values[:1000], values[1_048_573 : 1_048_573 + 1000])


def test_a_model_larger_than_the_host_is_refused_before_it_is_drawn() -> None:
    with pytest.raises(DeviceError, match="free on the host"):
        random_model("65536x30x64x262144", dtype=torch.float32)


def test_the_end_token_is_never_the_best_and_gates_are_open() -> None:
    model = random_model("tiny", dtype=torch.float32)
    state, end = model.decoder_state, model.tokenizer.eos_id
    logits = decoder_from_state(model.decoder_config, state).logits(torch.randn(200, model.decoder_config.dim))

    assert not logits[:, end].any()
    assert (logits.amax(-1) > 0).all()
    assert (state["adapter.gates"] == 0.5).all()


def test_no_two_layers_and_no_two_rows_are_alike() -> None:
    state = random_model("tiny", dtype=torch.float32).decoder_state
    first, second = state["layers.0.attention.qkv.weight"], state["layers.1.attention.qkv.weight"]

    assert not torch.equal(first, second)
    assert len(first.unique(dim=0)) == len(first)


def test_ids_beyond_the_pieces_are_text_and_the_others_are_unchanged() -> None:
    inner, wider = Tokenizer.load(embedded_model() / "tokenizer.model"), WiderTokenizer(32000)
    ids = [1, 400, 511, 512, 9000, 31999]

    detokenizer = IncrementalDetokenizer(wider)
    streamed = "".join([*(detokenizer.push(piece) for piece in ids), detokenizer.flush()])

    assert wider.encode("a red star") == inner.encode("a red star")
    assert wider.decode(ids[:3]) == inner.decode(ids[:3])
    assert wider.decode([31999])
    assert streamed == wider.decode(ids)
    with pytest.raises(ValueError, match="outside"):
        wider.decode([32000])
