"""Other programs: their weights are ours under other names, and with these they give our engine's answers.

vLLM's engine is made up: it has the calls of the real one, and its rows count their tokens.
"""

import dataclasses
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from scripts.peers.packages import MissingPackage
from scripts.peers.reference import ReferenceLoop
from scripts.peers.sizes import prompt_ids
from scripts.peers.vllm import Vllm
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
@pytest.mark.parametrize(
    ("cache", "spread"),
    [("dynamic", False), ("dynamic", True), ("static", False), ("static", True), ("compiled", True)],  # slow to compile
)
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


class MadeUpEngine:
    """Each step gives every row a token, ten times its number of tokens plus its prompt's first one.

    With `is_late`, the outputs of a step are those of the step before.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late, self.running, self.seen = is_late, dict[str, list[int]](), set[str]()
        self._unread: list[Any] = []
        self.num_steps = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert name not in self.seen
        self.seen.add(name)
        self.running[name] = [prompt["prompt_token_ids"][0]]
        assert (sampling.temperature, sampling.ignore_eos, sampling.detokenize) == (0.0, True, False)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.num_steps += 1
        for tokens in self.running.values():
            tokens.append(10 * len(tokens) + tokens[0])
        made = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens[1:])])
            for name, tokens in self.running.items()
        ]
        told, self._unread = (self._unread, made) if self._is_late else (made, [])
        return told


@pytest.fixture(params=[False, True], ids=["at once", "a step late"])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Vllm, MadeUpEngine]:
    engine, options = MadeUpEngine(is_late=request.param), dict[str, Any]()

    def opened(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(llm_engine=engine)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=opened, SamplingParams=SimpleNamespace))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    ours = Vllm(Path("folder"), num_rows=64, dtype="bfloat16")
    assert options["model"] == "folder"
    switches = [options[name] for name in ("load_format", "skip_tokenizer_init", "enable_prefix_caching")]
    assert switches == ["dummy", True, False]
    assert options["max_num_batched_tokens"] >= 64 * 55
    return ours, engine


def test_rows_of_vllm_go_on_by_a_token_each_step(vllm: tuple[Vllm, MadeUpEngine]) -> None:
    ours, engine = vllm

    assert ours.prefill([[7, 1], [8, 1]]) == [17, 18]
    assert ours.step([0, 0], 2) == [27, 28]
    assert ours.step([0, 0], 3) == [37, 38]
    assert ours.prefill([[4, 1]]) == [14]
    ours.spread(3)
    assert ours.step([0] * 3, 2) == [24] * 3
    assert len(engine.running) == 3


def test_rows_that_vllm_has_ended_are_an_error(vllm: tuple[Vllm, MadeUpEngine]) -> None:
    ours, engine = vllm
    ours.prefill([[7, 1]])
    engine.running.clear()

    with pytest.raises(RuntimeError, match="ended all rows before token 2"):
        ours.step([0], 2)


def test_without_its_package_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)

    with pytest.raises(MissingPackage, match=r"vllm cannot be imported .*: install a vllm for this torch"):
        Vllm(Path("folder"), num_rows=1, dtype="bfloat16")
