"""The other programs' weights are ours under other names. They and the reference's loop give our engine's answers."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from llama_adapter.app.models.random_model import WiderTokenizer
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.weights.names import half_split
from llama_adapter.runtime.devices import open_backend
from llama_adapter.vision.encoder import encoder_from_state
from scripts.peers.files import gguf_tensors, write_gguf
from scripts.peers.huggingface import CacheKind, HuggingFaceDecoder, HuggingFaceVision
from scripts.peers.measuring import DecoderEngine
from scripts.peers.ours import OurDecoder
from scripts.peers.reference import ReferenceLoop
from scripts.peers.sizes import prompt_ids
from scripts.peers.weights import bare_tower, decoder_sizes, decoder_state, encoder_state
from tests.bounds import Float64, difference, spread
from tests.llm.toys import drain, open_runner

NUM_NEW_TOKENS = 8  # of the reference's loop


def without_adapter(*, kv_heads: int = 0) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The tiny decoder with closed gates, which other programs can load as a LLaMA; with `kv_heads`, in groups."""
    config = decoder_sizes("tiny")
    config = dataclasses.replace(config, num_kv_heads=kv_heads or config.num_heads)
    state = decoder_state(config)
    state["adapter.gates"].zero_()
    return config, state


def some_steps(engine: DecoderEngine, *, spread: bool) -> list[list[int]]:
    """Tokens of three rows; with `spread`, all rows are copies of the first."""
    prompts = [prompt_ids(0 if spread else row, length=9) for row in range(3)]
    token_ids = engine.prefill(prompts[:1]) * 3 if spread else engine.prefill(prompts)
    if spread:
        engine.spread(3)
    steps = [token_ids]
    for number in range(4):
        steps.append(engine.step(steps[-1], len(prompts[0]) + number))
    return steps


def our_decoder(config: DecoderConfig, state: dict[str, Tensor]) -> OurDecoder:
    return OurDecoder(open_runner(config, state, backend=open_backend("cpu"), num_slots=3))


def test_spread_copies_a_row() -> None:
    config = decoder_sizes("tiny")
    engine = our_decoder(config, decoder_state(config))

    alone = [engine.prefill([prompt_ids(0, length=9)])]
    for number in range(4):
        alone.append(engine.step(alone[-1], 9 + number))

    assert some_steps(engine, spread=True) == [step * 3 for step in alone]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("cache", get_args(CacheKind))
@pytest.mark.parametrize("spread", [False, True])
def test_hugging_face_gives_the_same_tokens(cache: CacheKind, spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, state = without_adapter(kv_heads=2 if spread else 0)
    if cache == "compiled":  # the step is traced as for Inductor, whose own compiler takes half a minute
        plain: Any = importlib.import_module("torch._dynamo.backends.debugging").aot_eager
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: plain(graph, inputs))
    theirs = HuggingFaceDecoder(state, config, dtype=torch.float32, cache=cache)

    assert some_steps(theirs, spread=spread) == some_steps(our_decoder(config, state), spread=spread)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_hugging_face_gives_the_same_features() -> None:
    config = bare_tower("vit-tiny")
    state = encoder_state(config)
    encoder = encoder_from_state(config, state)
    pixels = torch.randint(0, 256, (2, 224, 224, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)

    hidden_BTW = HuggingFaceVision(state, config.clip, dtype=torch.float32).encode(pixels.numpy())
    with torch.inference_mode():
        theirs = encoder.clip.projection(encoder.clip.post_norm(hidden_BTW))

        ours = encoder.features(pixels)
        with Float64():
            exact = encoder.double().features(pixels)
        assert difference(theirs, ours) <= spread(ours, exact)


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_every_weight_of_a_plain_llama_is_in_the_gguf_file(kv_heads: int) -> None:
    config, state = without_adapter(kv_heads=kv_heads)

    named = dict(gguf_tensors(state, config))

    ours = {name: tensor for name, tensor in state.items() if not name.startswith("adapter.")}
    written = sum(tensor.numel() for tensor in named.values())
    assert written == sum(tensor.numel() for name, tensor in ours.items() if not name.endswith("bias"))
    rows = {part: named[f"blk.0.attn_{part}.weight"] for part in "qkv"}
    in_our_order = [half_split(rows["q"], config.num_heads), half_split(rows["k"], config.num_kv_heads), rows["v"]]
    assert torch.equal(torch.cat(in_our_order), state["layers.0.attention.qkv.weight"])


def test_a_gguf_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    import gguf

    config, state = without_adapter()
    write_gguf(state, config, tmp_path / "float32.gguf", dtype="f32")
    write_gguf(state, config, tmp_path / "bf16.gguf", dtype="bf16")

    for name in ("float32.gguf", "bf16.gguf"):
        found = {one.name: one for one in gguf.GGUFReader(str(tmp_path / name)).tensors}
        for theirs, tensor in gguf_tensors(state, config):
            values = torch.from_numpy(gguf.dequantize(found[theirs].data, found[theirs].tensor_type).copy())
            wanted = tensor.bfloat16().float() if name == "bf16.gguf" and tensor.ndim > 1 else tensor
            assert torch.equal(values.view(wanted.shape), wanted), theirs


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
def test_llama_cpp_gives_the_same_tokens(tmp_path: Path, spread: bool) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled for minutes; the peers' benchmark needs it")
    from scripts.peers.llama_cpp import LlamaCpp

    config, state = without_adapter()
    write_gguf(state, config, tmp_path / "float32.gguf", dtype="f32")
    theirs = LlamaCpp(tmp_path / "float32.gguf", num_rows=3, num_threads=1)

    assert some_steps(theirs, spread=spread) == some_steps(our_decoder(config, state), spread=spread)


@pytest.mark.parametrize("lengths", [(9, 9, 9), (5, 12, 8)], ids=["equal", "ragged"])
def test_the_reference_loop_gives_the_greedy_tokens_of_our_engine(lengths: tuple[int, ...]) -> None:
    config = decoder_sizes("tiny")
    state = decoder_state(config)
    eos_id = WiderTokenizer(config.vocab_size).eos_id
    prompts = [tuple(prompt_ids(row, length=length)) for row, length in enumerate(lengths)]
    visual_query_BQD = torch.randn(
        len(prompts), config.num_queries, config.dim, generator=torch.Generator().manual_seed(1)
    )

    loop = ReferenceLoop(state, config, num_rows=len(prompts))
    rows = loop.generate(prompts, visual_query_BQD, num_new_tokens=NUM_NEW_TOKENS)

    engine = Engine(open_runner(config, state, backend=open_backend("cpu"), num_slots=len(prompts)), eos_id=eos_id)
    prefixes = engine.project_prefix(visual_query_BQD)
    for index, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
        sampling = SamplingParams(max_new_tokens=NUM_NEW_TOKENS)
        engine.submit(GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=sampling))
    ours: list[list[int]] = [[] for _ in prompts]
    for output in drain(engine):
        ours[output.request_id].append(output.token_id)

    # Like the reference, the loop ends with its longest row, so rows with shorter prompts get more tokens.
    assert [row[:NUM_NEW_TOKENS] for row in rows] == ours
