"""Weights, configurations and cards: they are opened with correct sizes, or refused with a sentence."""

import io
import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from hypothesis.strategies import DrawFn, booleans, integers
from safetensors.torch import save
from torch import Tensor, nn

from llama_adapter.app.models.bundle_manifest import LLM, MANIFEST, VISION, read_manifest
from llama_adapter.app.models.bundle_tensors import read_half
from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights import names
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.families import FAMILIES
from llama_adapter.llm.weights.gguf import open_gguf
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.runtime.errors import CheckpointError, GraphError
from llama_adapter.runtime.graphs.card import GraphCard
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.out_of_distribution import read_familiarity
from tests.fuzz.mutators import (
    either,
    flipped,
    mutated_bytes,
    mutated_json,
    mutated_safetensors,
    mutated_zip,
    one_in,
    one_of,
    words,
)
from tests.fuzz.target import Target, refused, scratch, written
from tests.llm.gguf_files import write_gguf

_GOLDEN = Path(__file__).parents[1] / "golden"
_REFUSALS = (CheckpointError, GraphError)
_DIM, _VOCAB, _LAYERS, _FFN = 4, 6, 2, 8


def _opened(folder: str, files: Mapping[str, bytes], open_it: Callable[[Path], str]) -> str:
    """The outcome of opening a scratch folder with these files."""
    for name, data in files.items():
        written(f"{folder}/{name}", data)
    try:
        return f"ok {open_it(scratch() / folder)}"
    except _REFUSALS as error:
        return refused(error)


def meta_weights(data: bytes) -> str:
    """`consolidated.00.pth` of a LLaMA in Meta's form: zip, pickle and tensors."""
    files = {"consolidated.00.pth": data, "params.json": _params()}
    return _opened("meta", files, lambda place: str(open_meta(place).config.num_layers))


def meta_params(data: bytes) -> str:
    """`params.json` of a LLaMA in Meta's form."""
    files = {"consolidated.00.pth": _torch(_llama()), "params.json": data}
    return _opened("params", files, lambda place: f"{open_meta(place).config.rope_theta:g}"[:5])


def huggingface_weights(data: bytes) -> str:
    """`model.safetensors` of a LLaMA in Hugging Face's form: the header, and tensors by their names."""
    files = {"model.safetensors": data, "config.json": _config()}
    return _opened("hf", files, lambda place: str(open_huggingface(place).config.num_layers))


def huggingface_config(data: bytes) -> str:
    """`config.json` of a LLaMA in Hugging Face's form."""
    files = {"model.safetensors": save(_as_huggingface()), "config.json": data}
    return _opened("config", files, lambda place: f"{open_huggingface(place).config.rope_theta:g}"[:5])


def gguf(data: bytes) -> str:
    """A GGUF file: keys, tensors and the tokenizer. All tensors of an opened file are read."""

    def open_it(place: Path) -> str:
        tokenizer = Tokenizer.load(place / "m.gguf")
        source = open_gguf(place / "m.gguf")
        for tensor in source.tensors.values():
            assert tuple(tensor.read().shape) == tensor.shape
        return f"{source.config.num_layers} {len(tokenizer.end_ids)}"

    return _opened("gguf", {"m.gguf": data}, open_it)


def adapter(data: bytes) -> str:
    """An adapter's file, in the format of torch.save."""
    return _opened("adapter", {"a.pth": data}, lambda place: str(open_adapter(place / "a.pth").num_adapter_layers))


def clip(data: bytes) -> str:
    """CLIP as a state dict, as a TorchScript archive, or as safetensors; the first bytes decide."""
    name = "clip.pt" if data[:2] in (b"PK", b"\x80\x02") else "clip.safetensors"
    return _opened("clip", {name: data}, lambda place: str(open_clip(place / name).config))


def bundle(data: bytes) -> str:
    """A bundle's manifest, with the files of the embedded model."""
    place = scratch() / "bundle"
    if not place.exists():
        place.mkdir()
        for file in Path(embedded_model()).iterdir():
            if file.name != MANIFEST:
                (place / file.name).symlink_to(file.resolve())

    def open_it(place: Path) -> str:
        content = read_manifest(place)
        content.check_sizes()
        vision, decoder = content.configs()
        assert read_half(place / VISION, vision, content)
        assert read_half(place / LLM, decoder, content)
        return str(decoder.num_layers)[:3]

    return _opened("bundle", {MANIFEST: data}, open_it)


def card(data: bytes) -> str:
    """The card inside an exported encoder. Accepted ones are also written and read again."""

    def read(text: str) -> GraphCard:
        found = GraphCard.from_json(text, file="encoder.onnx")
        EncoderCard.from_graph(found, file="encoder.onnx")
        return found

    try:
        found = read(data.decode())
    except UnicodeDecodeError:
        return "no text"
    except GraphError as error:
        return refused(error)
    assert read(found.to_json()) == found
    return f"ok {found.dtype}"


def ood_detector(data: bytes) -> str:
    """The data of the out-of-distribution detector."""
    return _opened(
        "familiar",
        {"familiar.safetensors": data},
        lambda place: str(read_familiarity(place / "familiar.safetensors", num_queries=2, width=3).threshold)[:4],
    )


def tokenizer(data: bytes) -> str:
    """`tokenizer.model`: a protobuf, read by SentencePiece. A loaded model must encode and decode."""
    try:
        found = Tokenizer.from_bytes(data)
    except CheckpointError as error:
        return refused(error)
    ids = found.encode("A red circle é 图")
    assert all(0 <= one < found.vocab_size for one in ids)
    found.decode(ids)
    return "ok"


# Small good files. All numbers are ones, so that the files are always the same.


def _ones(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.ones(shape, dtype=torch.float16) for name, shape in shapes.items()}


def _llama() -> dict[str, Tensor]:
    sizes = DecoderConfig(vocab_size=_VOCAB, dim=_DIM, num_layers=_LAYERS, num_heads=1, ffn_dim=_FFN, norm_eps=1e-6)
    return _ones(names.llama_shapes(sizes))


def _as_huggingface() -> dict[str, Tensor]:
    return {names.to_huggingface(name): tensor for name, tensor in _llama().items()}


@cache
def _params() -> bytes:
    return json.dumps(
        {"dim": _DIM, "multiple_of": 2, "n_heads": 1, "n_layers": _LAYERS, "norm_eps": 1e-6, "vocab_size": -1}
    ).encode()


@cache
def _config() -> bytes:
    golden = json.loads((_GOLDEN / "LLaMA-HF/TINY/config.json").read_text())
    sizes = {"hidden_size": _DIM, "intermediate_size": _FFN, "num_hidden_layers": _LAYERS, "vocab_size": _VOCAB}
    return json.dumps({**golden, **sizes, "num_attention_heads": 1, "num_key_value_heads": 1}).encode()


def _torch(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def _ggufs() -> dict[str, bytes]:
    """Models with blocks of weights, and tokenizers of both kinds."""
    tokens = {"tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab"], "token_type": np.array([2, 3, 3, 1, 1, 1])}
    kinds = {"llama": {"scores": np.arange(6.0)}, "gpt2": {"pre": "qwen2", "merges": ["a b"], "eos_token_id": 2}}
    made = {}
    for (architecture, kind), more in zip((("llama", "llama"), ("qwen2", "gpt2")), kinds.values(), strict=True):
        sizes = {"block_count": 1, "context_length": 8, "embedding_length": 32, "feed_forward_length": 32}
        sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 16}
        stored = {**tokens, **more, "model": kind}
        keys = {f"{architecture}.{key}": value for key, value in sizes.items()}
        keys |= {f"tokenizer.ggml.{key}": value for key, value in stored.items()}
        matrix = (np.ones((32, 34), np.uint8), GGMLQuantizationType.Q8_0)
        blocks = {f"blk.0.{name}.weight": matrix for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        blocks |= {f"blk.0.{name}.weight": matrix for name in ("ffn_gate", "ffn_up", "ffn_down")}
        ones = np.ones(32, np.float32)
        blocks |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), ones)
        if architecture == "qwen2":
            blocks |= {f"blk.0.{name}.bias": ones for name in ("attn_q", "attn_k", "attn_v")}
        path = write_gguf(
            scratch() / "seed.gguf",
            {"general.architecture": architecture, **keys},
            {"token_embd.weight": np.ones((6, 32), np.float16), **blocks},
        )
        made[architecture] = path.read_bytes()
    return made


def _metas() -> dict[str, bytes]:
    return {"new": _torch(_llama()), "old": _torch(_llama(), _use_new_zipfile_serialization=False)}


def _adapters() -> dict[str, bytes]:
    golden = torch.load(_GOLDEN / "adapters/BIAS-TINY.pth", weights_only=True)
    small = {name: torch.ones([min(size, 4) for size in tensor.shape]) for name, tensor in golden["model"].items()}
    return {
        "release": _torch({**golden, "model": small}),
        "plain": _torch(small),
        "old": _torch(small, _use_new_zipfile_serialization=False),
    }


def _clip_state() -> dict[str, Tensor]:
    """OpenAI's names, with the smallest tower that OpenAI's widths allow."""
    width, patch, text = 64, 2, "transformer.resblocks.0.ln_1.weight"
    block = {
        "ln_1.weight": (width,), "ln_1.bias": (width,), "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,), "attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,),
        "ln_2.weight": (width,), "ln_2.bias": (width,), "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,), "mlp.c_proj.weight": (width, 4 * width), "mlp.c_proj.bias": (width,),
    }  # fmt: skip
    tower = {
        "conv1.weight": (width, 3, patch, patch), "class_embedding": (width,), "positional_embedding": (5, width),
        "ln_pre.weight": (width,), "ln_pre.bias": (width,), "ln_post.weight": (width,), "ln_post.bias": (width,),
        "proj": (width, 4), **{f"transformer.resblocks.0.{name}": shape for name, shape in block.items()},
    }  # fmt: skip
    return _ones({**{f"visual.{name}": shape for name, shape in tower.items()}, text: (4,), "logit_scale": ()})


class _Holder(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels


def _archive(state: Mapping[str, Tensor]) -> bytes:
    """The tensors as a TorchScript archive, the format in which OpenAI publishes CLIP."""
    root = _Holder()
    for name, tensor in state.items():
        *parents, last = name.split(".")
        place: nn.Module = root
        for number, parent in enumerate(parents):
            if parent not in place._modules:
                has_numbers = number + 1 < len(parents) and parents[number + 1].isdigit()
                place.add_module(parent, nn.Sequential() if has_numbers else _Holder())
            place = place._modules[parent]  # type: ignore[assignment]
        place.register_parameter(last, nn.Parameter(tensor))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(root), file)  # type: ignore[no-untyped-call]
    return file.getvalue()


def _clips() -> dict[str, bytes]:
    state = _clip_state()
    return {"state-dict": _torch(state), "safetensors": save(state), "torchscript": _archive(state)}


TINY_VISION = VisionConfig(
    clip=ClipConfig(image_size=4, patch_size=2, width=64, num_layers=1, num_heads=1, output_dim=4),
    query=QueryConfig(num_queries=2, width=4, depth=1, num_heads=1, mlp_dim=4, output_dim=4),
)


def _made_card() -> GraphCard:
    assert PictureEncoder(TINY_VISION)
    return EncoderCard(
        name="tiny", vision=TINY_VISION, dtype="float16", opset=17, fingerprint={"clip": "ab 1", "query": "cd 2"}
    ).to_graph()


def _familiar() -> dict[str, bytes]:
    shapes = {"mean": (2, 3), "directions": (2, 2, 3), "variances": (2, 2), "least_variance": (1,), "threshold": (1,)}
    return {"small": save({name: torch.ones(shape) for name, shape in shapes.items()})}


def _mutated_pickle(draw: DrawFn, data: bytes) -> bytes:
    """Change an integer in a pickle; otherwise mutate bytes."""
    places = [at for at, byte in enumerate(data) if byte in b"KMJ"]
    if not places or draw(booleans()):
        return _pickle_bytes(draw, data)
    at = one_of(draw, places)
    width = {b"K"[0]: 1, b"M"[0]: 2, b"J"[0]: 4}[data[at]]
    if one_in(draw, 3):  # an integer of eight bytes
        number = b"\x8a\x08" + draw(integers(0, 2**63 - 1)).to_bytes(8, "little")
    else:
        number = data[at : at + 1] + draw(integers(0, 256**width - 1)).to_bytes(width, "little")
    return data[:at] + number + data[at + 1 + width :]


_HARMLESS = (b"cbuiltins\nlen\n", b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
_pickle_bytes = mutated_bytes(
    *b". 0 1 2 ( t R Q s u ] } a e N ) \x85 \x86 \x94".split(b" "),
    *(*_HARMLESS, b"ctorch\nHalfStorage\n"),
    *(b"visual.transformer.resblocks.7.", b"layers.9999999.", b"visual_blocks.99999999.", pickle.dumps(10**30)),
)
_zipped = either(
    mutated_zip(
        {".pkl": _mutated_pickle, "": mutated_bytes()}, names=("archive/data.pkl", "archive/data/0", "archive/version")
    ),
    mutated_zip({".pkl": _mutated_pickle, "": mutated_bytes()}),
)
_tensors = mutated_safetensors(
    mutated_json(
        *words("F16 F32 BF16 I8 I64 BOOL F8_E4M3 dtype shape data_offsets __metadata__"),
        *([0, 0], [0], [1], [2**31], [2**63], [0, 2**40]),
        *words("model.layers.2999999.input_layernorm.weight vision_model.x visual.proj"),
    )
)


def _mutate_clip(draw: DrawFn, data: bytes) -> bytes:
    return (_zipped if data.startswith(b"PK") else _tensors)(draw, data)


_SIZES = (
    *(0, 1, 2, 4, 100_000_000, 2**40),
    *words("dim n_layers n_kv_heads rope_theta num_hidden_layers hidden_size"),
)
_GGUF_PIECES = (
    *(b"GGUF", b"llama.", b"tokenizer.ggml.", b"\x08\0\0\0", b"\x09\0\0\0", b"\x0c\0\0\0", b"\xff" * 8),
    *(b"rope.scaling.type", b"attention.key_length", b"output.weight", b"rope_freqs.weight", b"\0\0\0\x80\0\0\0\0"),
)
_tokens = mutated_bytes(b"\x0a", b"\x12", b"\x80\x80\x80\x80\x10", b"<0x", b"\xe2\x96\x81")
_hf_config = mutated_json(
    *(*_SIZES, *FAMILIES, *FAMILIES["gemma3_text"].defaults, "rope_scaling", "rope_parameters", 10**400),
    *({"rope_type": "default"}, {"type": "yarn", "factor": 2}, {"full_attention": {"rope_type": "linear"}}),
)
_manifest = mutated_json(*_SIZES, *words("files llm vision precision int8 float16 ../x DecoderConfig"))
TARGETS = (
    Target("meta-weights", meta_weights, _metas, _zipped),
    Target("meta-params", meta_params, lambda: {"small": _params()}, mutated_json(*_SIZES)),
    Target("huggingface-weights", huggingface_weights, lambda: {"small": save(_as_huggingface())}, _tensors),
    Target("huggingface-config", huggingface_config, lambda: {"small": _config()}, _hf_config),
    Target("gguf", gguf, _ggufs, either(flipped, mutated_bytes(*_GGUF_PIECES))),
    Target("adapter", adapter, _adapters, _zipped),
    Target("clip", clip, _clips, _mutate_clip),
    Target("bundle", bundle, lambda: {"embedded": (Path(embedded_model()) / MANIFEST).read_bytes()}, _manifest),
    Target(
        *("card", card, lambda: {"tiny": _made_card().to_json().encode()}),
        mutated_json(*words("clip query version fingerprint rgb bgr")),
    ),
    Target("ood_detector", ood_detector, _familiar, either(_tensors, flipped)),
    Target(
        *("tokenizer", tokenizer, lambda: {"golden": (_GOLDEN / "LLaMA/tokenizer.model").read_bytes()}),
        either(flipped, flipped, _tokens),
    ),
)
