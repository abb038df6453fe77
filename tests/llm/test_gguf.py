"""GGUF files: blocks, keys and tokenizers equal those of the packages that define them; damaged files are refused."""

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.pieces.folder import TokenizerSettings
from llama_adapter.llm.pieces.gguf_keys import keys_to_json
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights.build import decoder_tensors
from llama_adapter.llm.weights.gguf import open_gguf
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.llm.weights.names import SplitTensor
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.runtime.tensor_files.gguf_files import Blocks, read_gguf
from tests.llm.gguf_files import sentencepiece_keys, write_gguf, write_model
from tests.llm.test_sources_of_families import YARN
from tests.llm.test_sources_of_families import made as model_of
from tests.llm.toys import GOLDEN

ROWS, COLUMNS = 6, 512
# Types that the package can make.
QUANTISED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4")
# Types that it can only read: where a block has its scales, float16 numbers. Other bytes may have any value.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES |= dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0,))
TEXTS = (*Path("docs").glob("*.md"), *Path("llm").glob("*.py"))


def made(kind: str, rng: np.random.Generator) -> np.ndarray:
    """The bytes of random blocks, or plain numbers."""
    if kind in QUANTISED:
        return np.asarray(quantize(rng.standard_normal((ROWS, COLUMNS), np.float32), Kind[kind]))
    numbers, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // numbers, size), dtype=np.uint8)
    for place in SCALES[kind]:
        blocks[:, place : place + 2] = rng.standard_normal((len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", [*QUANTISED, *SCALES])
def test_tensors_of_every_type_equal_those_of_the_package(kind: str, tmp_path: Path) -> None:
    stored = made(kind, np.random.default_rng(len(kind)))
    expected = dequantize(stored, Kind[kind])
    path = write_gguf(tmp_path / "one.gguf", {"a.b": 1}, {"before": np.ones(3, np.float32), "w": (stored, Kind[kind])})
    tensor = read_gguf(path).tensors["w"]

    def values(part: Any) -> Any:
        return (part.read() if isinstance(part, Blocks) else part).float().numpy()

    assert tuple(tensor.shape) == expected.shape == (ROWS, COLUMNS)
    assert np.array_equal(values(tensor), expected)
    assert np.isfinite(expected).all()
    assert np.array_equal(values(tensor.narrow(0, 2, 3)), expected[2:5])
    assert np.array_equal(values(SplitTensor((tensor,)).read((0, range(1, 4)))), expected[1:4])
    assert np.array_equal(values(SplitTensor((tensor, tensor), 1).read()), np.concatenate([expected] * 2, 1))
    assert np.array_equal(values(tensor.narrow(1, 100, 60)), expected[:, 100:160])


def test_blocks_of_4_bits_are_rounded_once(tmp_path: Path) -> None:
    stored = made("Q4_0", np.random.default_rng(1))
    tensor = read_gguf(write_gguf(tmp_path / "one.gguf", {}, {"w": (stored, Kind.Q4_0)})).tensors["w"]
    assert isinstance(tensor, Blocks)
    int4 = find_scheme("int4")
    assert np.array_equal(int4.dequantise(int4.quantise(tensor.read())).numpy(), dequantize(stored, Kind.Q4_0))


def test_keys_equal_those_of_the_package_in_one_file_and_in_parts(tmp_path: Path) -> None:
    keys = {"x.text": "é", "x.whole": 7, "x.real": 0.5, "x.yes": True, "x.texts": ["a", "", "ü"]}
    arrays = {"x.numbers": np.array([1, 2, 3]), "x.reals": np.array([0.5, 1.5])}
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    write_gguf(first, keys | arrays, {"a": np.zeros((2, 3), np.float32)})
    write_gguf(second, {"split.no": 1}, {"b": np.arange(4, dtype=np.float32)})
    for path in (first, second):
        found = read_gguf(path)
        assert {key: found.keys[key] for key in keys} == keys
        assert all(np.array_equal(found.keys[key], value) for key, value in arrays.items())
        assert list(found.tensors) == ["a", "b"]
        assert found.paths == (first, second)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"There is no file .*m-00002-of-00002"):
        read_gguf(first)


_ENTRY = b"\x01\0\0\0\0\0\0\0w"  # of the table of tensors: then the number of dimensions, two dimensions, and the type


def changed(at: int, value: bytes, data: bytes, *, after: bytes = b"") -> bytes:
    at += data.index(after) + len(after)
    return data[:at] + value + data[at + len(value) :]


DAMAGE: tuple[tuple[str, Callable[[bytes], bytes], str], ...] = (
    ("magic", partial(changed, 0, b"GGML"), "does not begin with GGUF"),
    ("version", partial(changed, 4, b"\x01\0\0\0"), "of version 1"),
    ("byte order", partial(changed, 4, b"\0\0\0\x03"), "big-endian"),
    ("number of tensors", partial(changed, 8, b"\xff" * 8), "tensors"),
    ("number of keys", partial(changed, 16, b"\xff" * 8), "beyond the file"),
    ("length of a text", partial(changed, 24, b"\xff" * 8), "beyond the file"),
    ("end of the file", lambda data: data[:-40], "tensor w ends beyond the file"),
    ("end of the table", lambda data: data[:60], "beyond the file"),
    ("type of a tensor", partial(changed, 20, b"\x63", after=_ENTRY), "type 99"),
    ("width of a row", partial(changed, 4, b"\x21", after=_ENTRY), "within a block"),
)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    data = write_gguf(
        tmp_path / "good.gguf", {"a.text": "word"}, {"w": (made("Q8_0", np.random.default_rng(0))[:, :34], Kind.Q8_0)}
    ).read_bytes()
    for name, damage, message in DAMAGE:
        path = tmp_path / "bad.gguf"
        path.write_bytes(damage(data))
        with pytest.raises(CheckpointError, match=message):
            print(name, read_gguf(path).tensors)
    weights = {"w": np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match=r"lacks the keys `llama.block_count`, .*rms_epsilon`"):
        open_gguf(write_gguf(tmp_path / "bare.gguf", {"general.architecture": "llama"}, weights))


# Keys of Phi-3 or further tensors, and what is said about them.
CONTRADICTIONS: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    *(
        ({key: [True, False]}, {}, rf"layers of the model .* differ \(phi3.{key}\)")
        for key in ("expert_count", "attention.sliding_window", "rope.scaling.factor", "rope.scaling.type")
    ),
    ({"embedding_length": [64, 32]}, {}, r"differ \(phi3.embedding_length\)"),
    ({}, {"rope_factors_long.weight": np.ones(2, np.float32)}, "lacks the tensor `rope_factors_short.weight`"),
    (
        {},
        {"output_norm.weight": np.ones(64, np.float32)},
        "weights beside it have 0; they have `w`, `output_norm.weight`",
    ),
    (
        {"attention.causal": False},
        {f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32) for layer in range(2)},
        r"attend to later ones \(is_causal\)",
    ),
)


@pytest.mark.parametrize(("changes", "tensors", "message"), CONTRADICTIONS)
def test_keys_that_contradict_each_other_are_refused(
    changes: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sizes = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4}
    keys = {**sizes, "attention.layer_norm_rms_epsilon": 1e-5, **changes}
    named = {"general.architecture": "phi3", **{f"phi3.{key}": value for key, value in keys.items()}}
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write_gguf(tmp_path / "m.gguf", named, {"w": np.ones(3, np.float32), **tensors}))


def texts() -> list[str]:
    """Texts with all that pre-tokenizers treat in their own way."""
    chance = random.Random(7)
    pieces = ["the", "THE", "don't", "I'LL", "hello", "World", "1", "23", "4567", "...", "!?", "/a", "_b", "é", "ñÑ"]
    pieces += ["图", "图片", "ß", "İ", "👍🏽", "ё", "े", "-", "'", " ", "  ", "   ", "\n", "\n\n", " \n", "\r\n", "\t"]
    made = ["".join(chance.choice(pieces) for _ in range(chance.randint(1, 12))) for _ in range(300)]
    return ["", " ", "  a", "a  ", "\n\n1", *made]


@functools.cache
def trained_model() -> dict[str, Any]:
    """The vocabulary and merges of a byte-level tokenizer. Tests must not change them."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train([str(path) for path in TEXTS], trainer)
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    return model


@pytest.mark.parametrize(
    "pre", ["gpt-2", "mellum", "a.x-4.0", "smollm", "llama-bpe", "falcon3", "midm-2.0", "qwen2", "gpt-4o", "tekken"]
)
def test_byte_level_tokenizers_equal_those_of_transformers(pre: str) -> None:
    model = trained_model()
    tokens = [
        *sorted(model["vocab"], key=model["vocab"].__getitem__),
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "[PAD3]",
    ]
    merges = [" ".join(merge) for merge in model["merges"]]
    types = np.array([1] * (len(tokens) - 4) + [3, 3, 4, 5])
    keys = {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens},
        **{"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges},
        **{"tokenizer.ggml.bos_token_id": len(tokens) - 4, "tokenizer.ggml.eos_token_id": len(tokens) - 3},
        **{"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages }}"},
    }
    data, settings = keys_to_json(keys, name="m.gguf")
    ours = tokenizers.Tokenizer.from_str(data.decode())
    described = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": "llama-bpe" if pre == "midm-2.0" else pre,  # as llama.cpp reads it
        "tokens": tokens,
        "merges": merges,
        "token_type": types.tolist(),
    }
    theirs, _ = convert_gguf_tokenizer("llama", described)
    if pre == "qwen2":  # the model's own class, with its normalizer
        theirs.normalizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[]).backend_tokenizer.normalizer
    if pre == "smollm":  # not known to transformers; as in the model's tokenizer.json
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    theirs.model.ignore_merges = pre in ("llama-bpe", "falcon3", "midm-2.0", "tekken")
    marked = ["<|im_start|>user\n1<|im_end|>", "<think>\n\n</think>", "e\u0301<|im_end|>"]
    for text in [*texts(), *marked]:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert pre == "qwen2" or ours.decode(ids, skip_special_tokens=False) == text
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    expected = TokenizerSettings(end_ids=(len(tokens) - 3,), chat_template="{{ messages }}", names=names)
    assert settings == expected


def test_pieces_of_sentencepiece_are_joined_as_it_joins_them() -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "LLaMA" / "tokenizer.model"))
    data, settings = keys_to_json(sentencepiece_keys(processor), name="m.gguf")
    ours = tokenizers.Tokenizer.from_str(data.decode())
    for text in texts():
        ids = ours.encode(text).ids
        assert ids == [processor.bos_id(), *processor.encode(text)], text
        assert ours.decode(ids) == text
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert settings == TokenizerSettings(end_ids=(2,), names=names)
    bare, _ = keys_to_json(sentencepiece_keys(processor, add_space_prefix=False, add_bos_token=False), name="m.gguf")
    unprefixed = tokenizers.Tokenizer.from_str(bare.decode())
    whole = processor.encode("\n" + "a b")
    assert unprefixed.encode("a b").ids == whole[len(processor.encode("\n")) :]
    assert isinstance(unprefixed.decoder, decoders.Sequence)
    assert unprefixed.decode([]) == ""
    for prefixed, like in {None: bare, False: bare, True: data}.items():  # Gemma puts no space if the key is absent
        keys = sentencepiece_keys(processor, **({} if prefixed is None else {"add_space_prefix": prefixed}))
        gemma, _ = keys_to_json({**keys, "general.architecture": "gemma3"}, name="m.gguf")
        for part in ("normalizer", "decoder"):
            assert json.loads(gemma)[part] == json.loads(like)[part]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "bloom"}, "pre-tokenizer 'bloom'; supported are"),
        ({"model": "bert"}, "tokenizer of the kind 'bert'"),
        ({"model": None}, "no text as tokenizer.ggml.model"),
        ({"tokens": ["a", "a"]}, "a token twice"),
        ({"tokens": None}, "no list of texts as tokenizer.ggml.tokens"),
        ({"token_type": np.array([1])}, "no number for each token as tokenizer.ggml.token_type"),
        ({"merges": ["abc"]}, "merges that are not two tokens"),
        ({"eos_token_id": 2}, "eos_token_id outside its vocabulary"),
    ],
)
def test_tokenizers_that_cannot_be_built_are_refused(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": ["a b"]}
    keys = {f"tokenizer.ggml.{key}": value for key, value in (good | changes).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        keys_to_json(keys, name="m.gguf")


@pytest.mark.parametrize(
    ("architecture", "kind", "message", "hint"),
    [
        ("clip", "mmproj", "is a picture tower", "those that see are folders"),
        ("clip", "model", "is a picture tower", "those that see are folders"),  # of older converters
        ("llama", "adapter", "is a LoRA", "as --lora, and the model"),
        ("imatrix", "imatrix", "is an importance matrix", "name the file of a model"),
    ],
)
def test_a_file_without_a_model_is_named(architecture: str, kind: str, message: str, hint: str, tmp_path: Path) -> None:
    keys = {"general.architecture": architecture, "general.type": kind}
    path = write_gguf(tmp_path / "m.gguf", keys, {"w": np.ones(3, np.float32)})
    for opened in (open_gguf, Tokenizer.load):  # both say the same
        with pytest.raises(CheckpointError, match=message) as error:
            opened(path)
        assert hint in error.value.hint


# Models of `CASES` in test_sources_of_families.py that GGUF files can describe, and entries in which they differ.
MODELS: dict[str, dict[str, Any]] = {
    "llama 3.1": {"tie_word_embeddings": True},  # the file has no matrix of the head
    "llama with biases": {},
    "mistral": {},
    "mistral without window": {"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.3}},
    "phi3 in part": {},
    "olmo2": {},
    "olmo3": {},
    "granite": {},
    "qwen2": {"use_sliding_window": False},  # no key turns its windows on
    "smollm3": {"use_sliding_window": False},  # no key turns its windows on
    "qwen3": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},  # no other has it
    "gemma2": {"query_pre_attn_scalar": 10},  # the head size, for files do not have it
    "gemma3": {"query_pre_attn_scalar": 6},  # the head size, for files do not have it
    "gemma3 without windows": {},
}


def config_of(name: str, keys: dict[str, Any], folder: Path) -> DecoderConfig:
    """The configuration of a model of `MODELS` with further keys. Without value, a key is left out."""
    model = model_of(name, **MODELS[name])
    architecture = {"gemma3": "gemma3", "gemma2": "gemma2"}.get(name, "olmo2")
    return open_gguf(
        write_model(folder / "m.gguf", model, {f"{architecture}.{key}": value for key, value in keys.items()})
    ).config


_WINDOW, _EVERY = "attention.sliding_window", "attention.sliding_window_pattern"
# A model, further keys, and the windows of its first layers. The models have windows of 5, 5 and 7.
WINDOWS: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...] = (
    ("gemma2", {}, (5, 0, 5)),
    ("gemma2", {_WINDOW: None}, (4096, 0, 4096)),  # llama.cpp's default
    ("gemma2", {_WINDOW: 0}, (0, 0, 0)),
    ("gemma2", {_EVERY: 3}, (5, 5, 0)),
    ("gemma3", {}, (5, 5, 5, 5, 5, 0, 5)),
    ("gemma3", {_WINDOW: None}, (0,) * 7),
    ("gemma3", {_WINDOW: 0, _EVERY: [True, True, False, True, True, False, True]}, (0,) * 7),
    ("gemma3", {_EVERY: [True, False, False, True, True, False, True]}, (5, 0, 0, 5, 5, 0, 5)),
    ("gemma3", {_EVERY: 2}, (5, 0, 5, 0, 5, 0, 5)),
    ("olmo3", {_WINDOW: None}, (0,) * 5),
    ("olmo3", {_WINDOW: 0}, (0,) * 5),
    ("olmo3", {_EVERY: None}, (7, 7, 7, 0, 7)),
    ("olmo3", {_EVERY: 2}, (7, 0, 7, 0, 7)),
)


@pytest.mark.parametrize(("name", "keys", "windows"), WINDOWS)
def test_keys_give_layers_their_windows(
    name: str, keys: dict[str, Any], windows: tuple[int, ...], tmp_path: Path
) -> None:
    config = config_of(name, keys, tmp_path)
    assert (config.layer_windows or (0,) * config.num_layers) == windows
    if name == "gemma3":  # windows have a theta of their own
        thetas = [one.theta for one in map(config.rotary_of, range(config.num_layers)) if one]
        assert thetas == [1e4 if window else 1e6 for window in windows]


def test_the_theta_of_windows_and_keys_of_ollamas_converter_are_read(tmp_path: Path) -> None:
    given = {"rope.freq_base": 3e5}
    for more, theta in (({}, 3e5), ({"rope.freq_base_swa": 2e4}, 2e4)):
        config = config_of("olmo3", given | more, tmp_path)
        assert [(one.theta, one.scaling) for one in config.rotaries] == [(3e5, "yarn"), (theta, "none")]

    names = ("freq_base", "freq_base_swa", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow")
    theirs = ("global.freq_base", "local.freq_base", "scaling.beta_fast", "scaling.beta_slow")
    values = (5e5, 2e4, 16.0, 2.0)
    yarn = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
    ours, ollamas = (
        config_of("gemma3", {f"rope.{key}": value for key, value in keys.items()}, tmp_path)
        for keys in (
            yarn | dict(zip(names, values, strict=True)),
            yarn | {"freq_base": None} | dict(zip(theirs, values, strict=True)),
        )
    )
    assert [(one.theta, one.beta_fast, one.beta_slow) for one in ours.rotaries] == [(5e5, 16.0, 2.0), (2e4, 32.0, 1.0)]
    assert ollamas == ours


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.proves("GGUF files", "CPU")
def test_models_equal_those_in_the_format_of_hugging_face(name: str, tmp_path: Path) -> None:
    model = model_of(name, **MODELS[name])
    model.save_pretrained(tmp_path / "folder")
    ours = open_gguf(write_model(tmp_path / "m.gguf", model, {}))
    theirs = open_huggingface(tmp_path / "folder")
    tables = [
        [
            None if rotary is None else rotary.frequencies(source.config.head_dim, context=context)
            for layer in range(source.config.num_layers)
            for context in (16, 100)
            for rotary in [source.config.rotary_of(layer)]
        ]
        for source in (ours, theirs)
    ]
    np.testing.assert_equal([one is None for one in tables[0]], [one is None for one in tables[1]])
    for one, other in zip(*tables, strict=True):
        np.testing.assert_allclose(one or (), other or (), rtol=1e-6)
    plain = {"rotaries": (), "layer_rotaries": (), "rope_theta": 1.0}
    assert dataclasses.replace(ours.config, **plain) == dataclasses.replace(theirs.config, **plain)
    mine, yours = (dict(decoder_tensors(ours.config, source=one, adapter=None, dtype=None)) for one in (ours, theirs))
    assert mine.keys() == yours.keys()
    assert [key for key in mine if not torch.equal(mine[key].float(), yours[key].float())] == []
