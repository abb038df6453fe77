"""Small tokenizers of every kind, trained on the spot, and random texts in all scripts."""

import functools
import io
import json
import random
from collections.abc import Callable, Iterator

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
# Special tokens of the families, and two that are not special although templates write them.
SPECIALS = (
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
)
OTHERS = ("<think>", "</think>")

_ALPHABETS = (
    *("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJ", "0123456789", ".,:;!?'\"()[]{}<>|/\\_-+=*&^%$#@~`"),
    *("  \n\t\r", "\u00a0\u2003\u200b\u2581\ufeff\u0301", "äöüßéñçøåœ", "абвгдежзи", "αβγδεζ", "אבגדה", "ابتثجح"),
    *(
        "हिन्दीभाषा",
        "ไทยภาษา",
        "日本語漢字かなカナ",
        "한국어글",
        "ɐɑɒ",
        "🙂🚀👩‍💻🏳️‍🌈",
        "𝔘𝔫𝔦𝒞",
        "\x00\x01\x7f\ue000\ue001\ufffd",
    ),
)


def texts(number: int, *, seed: int = 0, longest: int = 6) -> Iterator[str]:
    """Random texts of 0 to `longest` runs in one script each."""
    draw = random.Random(seed)
    for _ in range(number):
        runs = (draw.choices(draw.choice(_ALPHABETS), k=draw.randint(1, 5)) for _ in range(draw.randint(0, longest)))
        yield "".join(map("".join, runs))


def _corpus() -> list[str]:
    words = "a red circle and two blue squares stand on the green line, as there's nothing else to see in 2025. "
    return [words * 3, "user assistant system model", *texts(400, seed=1)]


def _with_marks(made: Tokenizer, *, begins: bool = True, **marks: bool) -> bytes:
    made.add_special_tokens([AddedToken(one, normalized=False, **marks) for one in SPECIALS])
    made.add_tokens([AddedToken(one, normalized=False) for one in OTHERS])
    if begins:
        begin = SPECIALS[0]
        pair = (begin, made.token_to_id(begin))
        made.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[pair])
    return made.to_str().encode()


def _byte_level(split: str | None, *, begins: bool) -> bytes:
    made = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    made.pre_tokenizer = pre_tokenizers.Sequence([*first, plain])
    made.normalizer = normalizers.NFC() if split == QWEN else None  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return _with_marks(made, begins=begins)


def _byte_fallback(*, metaspace: bool) -> bytes:
    """As the `tokenizer.json` of Llama 2 and Mistral, with either way of putting a blank in front."""
    unknown, pieces = "<unk>", [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token=unknown))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[unknown, "<s>", "</s>", *pieces], limit_alphabet=60, show_progress=False
    )
    made.train_from_iterator(_corpus(), trainer)
    # Training makes special tokens of the bytes; as in real files, they are ordinary pieces.
    content = made.to_str().encode()
    plain = Tokenizer.from_str(_without_added(content, keep=3))
    return _with_marks(plain)


def _without_added(content: bytes, *, keep: int) -> str:
    values = json.loads(content)
    values["added_tokens"] = values["added_tokens"][:keep]
    return json.dumps(values)


def _unigram() -> bytes:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(_corpus(), trainer)
    return _with_marks(made)


KINDS: dict[str, Callable[[], bytes]] = {
    "Llama 3": functools.partial(_byte_level, LLAMA_3, begins=True),
    "Qwen": functools.partial(_byte_level, QWEN, begins=False),
    "GPT-2": functools.partial(_byte_level, None, begins=False),
    "Llama 2": functools.partial(_byte_fallback, metaspace=False),
    "Mistral": functools.partial(_byte_fallback, metaspace=True),
    "unigram": _unigram,
}


@functools.cache
def tokenizer_json(kind: str) -> bytes:
    """The content of a `tokenizer.json` of a kind."""
    return KINDS[kind]()


@functools.cache
def sentencepiece_model(user_defined: tuple[str, ...] = ()) -> bytes:
    """The content of a `tokenizer.model` as LLaMA's, with byte fallback and identity normalisation."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_corpus()),
        model_writer=written,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=list(user_defined),
        minloglevel=2,
    )
    return written.getvalue()
