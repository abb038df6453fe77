"""Tokenizers of every kind give the ids and texts of the libraries they come from, whole and as streams."""

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
import tokenizers
import transformers
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from llama_adapter.llm.chat import ChatFormat
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.pieces.byte_ranks import ranks_to_json
from llama_adapter.llm.pieces.folder import TokenizerSettings, find_tokenizer, read_settings
from llama_adapter.llm.pieces.json_pieces import LETTERS
from llama_adapter.llm.tokenizer import IncrementalDetokenizer, Tokenizer
from llama_adapter.runtime.errors import CheckpointError
from tests.llm.vocabularies import KINDS, LLAMA_3, OTHERS, SPECIALS, sentencepiece_model, texts, tokenizer_json

NUM_TEXTS = 2_000
SENTENCEPIECE = "SentencePiece"
SETTINGS = TokenizerSettings(end_ids=(2,), chat_template="{{ '<think></think>' }}")


def opened(kind: str, settings: TokenizerSettings = SETTINGS) -> Tokenizer:
    if kind == SENTENCEPIECE:
        return Tokenizer.from_bytes(sentencepiece_model())
    return Tokenizer.from_bytes(tokenizer_json(kind), name=kind, settings=settings)


def of_its_library(kind: str) -> Any:
    """The same tokenizer of `tokenizers`, or of SentencePiece."""
    if kind == SENTENCEPIECE:
        return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    return tokenizers.Tokenizer.from_str(tokenizer_json(kind).decode())


def stored(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """The tokenizer as a bundle in `folder` has it."""
    folder.mkdir(exist_ok=True)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    return Tokenizer.load_stored(folder, tokenizer.files)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = IncrementalDetokenizer(tokenizer)
    return "".join([*map(stream.push, ids), stream.flush()])


@pytest.mark.parametrize("kind", [*KINDS, SENTENCEPIECE])
@pytest.mark.proves("SentencePiece, tokenizer.json, byte ranks", "CPU")
def test_ids_and_texts_are_those_of_the_library(kind: str) -> None:
    ours, theirs, given = opened(kind), of_its_library(kind), list(texts(NUM_TEXTS))
    if kind == SENTENCEPIECE:
        expected, decoded = (ids := theirs.encode(given)), theirs.decode(ids)
    else:
        theirs.encode_special_tokens = True
        expected = [encoding.ids for encoding in theirs.encode_batch(given)]
        decoded = theirs.decode_batch(expected)

    assert [ours.encode(text, bos=kind != SENTENCEPIECE) for text in given] == expected
    for ids, text in zip(expected, decoded, strict=True):
        assert streamed(ours, ids) == text == ours.decode(ids)


@pytest.mark.parametrize("kind", [*KINDS, SENTENCEPIECE])
def test_any_ids_stream_as_they_decode_and_nothing_is_held_for_long(kind: str) -> None:
    tokenizer, theirs, draw = opened(kind), of_its_library(kind), random.Random(0)
    characters = [tokenizer.encode_run(one, is_inner=True) for one in ("\U0001fae8", "\u0ec6", "a")]
    for _ in range(300):
        ids: list[int] = []
        for _ in range(draw.randint(0, 12)):
            # Many are cut short. Four bytes are five ids where a blank precedes them.
            ids += draw.choice([*characters, [draw.randrange(tokenizer.vocab_size)]])[: draw.randint(1, 5)]
        whole, shown, stream = tokenizer.decode(ids), "", IncrementalDetokenizer(tokenizer)
        for piece_id in ids:
            peeked, _ = stream.peek(piece_id), stream.peek(draw.randrange(tokenizer.vocab_size))
            added = stream.push(piece_id)
            assert peeked == (added or tokenizer.name_of(piece_id))
            shown += added
            assert whole.startswith(shown)
            assert len(stream._bytes.getstate()[0]) <= 3, "a character has four bytes at most"
        assert shown + stream.flush() == whole
        if tokenizer.pieces.is_exact:
            assert whole == theirs.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_a_special_token(kind: str) -> None:
    tokenizer, draw = opened(kind), random.Random(0)
    names = {*SPECIALS, *OTHERS, *(("<unk>", "<s>", "</s>") if kind in ("Llama 2", "Mistral") else ())}
    assert set(tokenizer.marks) >= names
    ids = {mark.id for name, mark in tokenizer.marks.items() if name != "<unk>"}
    for text in texts(1000, longest=2):
        words = [draw.choice([*tokenizer.marks]) for _ in range(3)]
        spelled = text.join([*words, words[0][:3] + words[1] + words[0][3:]])
        found = tokenizer.encode(spelled, bos=False)
        assert not ids & set(found)
        assert not ids & set(tokenizer.encode_continuation(text, spelled))
    if kind not in ("unigram",):  # whose vocabulary lacks letters
        assert tokenizer.decode(tokenizer.encode("a <|im_end|> b", bos=False)) == "a <|im_end|> b"


def test_runs_of_blanks_stay_tokens_of_ordinary_text() -> None:
    made = tokenizers.Tokenizer.from_str(tokenizer_json("Llama 2").decode())
    made.add_tokens([tokenizers.AddedToken("\n\n", normalized=False)])
    settings = TokenizerSettings(end_ids=(2,), chat_template="{{ 'user\n\n' }}")
    tokenizer = Tokenizer.from_bytes(made.to_str().encode(), settings=settings)

    assert made.token_to_id("\n\n") in tokenizer.encode("a\n\nb")
    assert "\n\n" not in tokenizer.marks


def test_a_part_of_a_character_has_the_names_of_its_bytes() -> None:
    tokenizer = opened("Qwen")
    ids = tokenizer.encode("\U0001fae8")

    assert "".join(map(tokenizer.name_of, ids)) == "<0xF0><0x9F><0xAB><0xA8>"
    assert IncrementalDetokenizer(tokenizer).peek(ids[0]).startswith("<0xF0>")
    assert tokenizer.name_of(tokenizer.marks["<|im_end|>"].id) == "<|im_end|>"
    llama = Tokenizer.from_bytes(sentencepiece_model())
    assert IncrementalDetokenizer(llama).peek(llama.eos_id) == "</s>"


# Byte ranks, as in Llama 3's `tokenizer.model`


def by_ranks(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The merges of tiktoken: of all neighbours, those with the lowest rank together are joined first."""
    parts = [bytes([byte]) for byte in piece]
    if piece in ranks:
        return [ranks[piece]]
    while True:
        joined = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not joined:
            return [ranks[part] for part in parts]
        _, at = min(joined)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.mark.proves("SentencePiece, tokenizer.json, byte ranks", "CPU")
def test_a_table_of_byte_ranks_is_read_as_tiktoken_does() -> None:
    vocabulary = json.loads(tokenizer_json("Llama 3"))["model"]["vocab"]
    ranks = {bytes(LETTERS.index(letter) for letter in piece): rank for piece, rank in vocabulary.items()}
    data = b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for piece, rank in ranks.items())
    content = ranks_to_json(data, name="tokenizer.model", num_pieces=len(ranks))
    tokenizer = Tokenizer.from_bytes(content, settings=TokenizerSettings(end_ids=(len(ranks) + 9,)))

    assert tokenizer.vocab_size == len(ranks) + 256
    assert tokenizer.marks["<|eot_id|>"].id == tokenizer.eos_id
    for text in texts(300):
        words = regex.findall(LLAMA_3, text)
        expected = [one for word in words for one in by_ranks(word.encode(), ranks)]
        assert tokenizer.encode(text) == [len(ranks), *expected]
    with pytest.raises(CheckpointError, match="byte ranks, and that of Llama 3 has 128,000") as caught:
        Tokenizer.from_bytes(data)
    assert "tokenizer.json" in caught.value.hint


# What a folder says


def added(name: str, token_id: int) -> dict[str, Any]:
    return {"content": name, "id": token_id}


@pytest.mark.parametrize(
    ("tokens", "config", "chosen"),
    [
        (None, {}, "tokenizer.model"),
        ([added("<|end|>", 600)], {"vocab_size": 700, "text_config": {"vocab_size": 600}}, "tokenizer.model"),
        ([added("<|end|>", 600)], {"vocab_size": 600, "text_config": {"vocab_size": 700}}, "tokenizer.json"),
        ([added("<s>", 1), added("</s>", 2)], {}, "tokenizer.model"),
        ([added("<s>", 1), added("<|end|>", 500)], {}, "tokenizer.json"),
        ([added("<|end|>", 500)], {"vocab_size": 500}, "tokenizer.model"),  # a token that the weights lack
        ([added("<start_of_turn>", 3)], {}, "tokenizer.json"),  # a piece that any text may spell
        ("damaged", {}, "tokenizer.model"),
    ],
)
def test_the_tokenizer_with_all_tokens_is_chosen(tmp_path: Path, tokens: Any, config: Any, chosen: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(("<start_of_turn>",)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if tokens is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))

    assert find_tokenizer(tmp_path) == tmp_path / chosen


@pytest.mark.parametrize(
    ("scheme", "is_blank", "chosen"),
    [
        *(("first", True, "tokenizer.json"), ("never", True, "tokenizer.json"), ("always", True, "tokenizer.model")),
        *(("first", False, "tokenizer.json"), ("never", False, "tokenizer.model")),
    ],
)
def test_the_json_is_chosen_if_it_puts_other_blanks(scheme: str, is_blank: bool, chosen: str, tmp_path: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model())
    model.normalizer_spec.add_dummy_prefix = is_blank
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    content: dict[str, Any] = {
        "added_tokens": [],
        "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": scheme},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.model", "nothing names an end for the other"
    settings: dict[str, Any] = {"eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert find_tokenizer(tmp_path) == tmp_path / chosen
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.model", "only the other begins texts"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    assert find_tokenizer(tmp_path) == tmp_path / chosen
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.model", "only the model begins texts"


def test_beside_a_model_that_puts_blanks_behind_marks_the_json_that_puts_none_is_chosen(tmp_path: Path) -> None:
    values = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    template = "{{ bos_token + ' ' + messages[0].content + eos_token + ' a' }}"
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    file = find_tokenizer(tmp_path)
    assert file == tmp_path / "tokenizer.json"

    tokenizer = Tokenizer.load(file, read_settings(tmp_path))
    chat = ChatFormat(tokenizer).encode([("user", "a red circle")])
    message = [{"role": "user", "content": "a red circle"}]
    assert [*chat.ids, *chat.rest_ids] == theirs.apply_chat_template(message, tokenize=True, return_dict=False)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<|turn|>": 500, "\n\n": 501}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"500": {"content": "<|turn|>"}, "501": {"content": "\n\n"}}},
        ),
    ],
)
@pytest.mark.parametrize(("kind", "hint"), [("Llama 2", "copy all files"), (SENTENCEPIECE, "from the model's page")])
def test_a_chat_with_a_token_that_the_file_lacks_is_refused(
    kind: str, hint: str, file: str, content: Any, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer"
    path.write_bytes(sentencepiece_model() if kind == SENTENCEPIECE else tokenizer_json(kind))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / file).write_text(json.dumps(content))
    template = (
        "{# <|turn|> #}{{ '<|turn|>' if messages[1:] }}{% for one in messages %}{{ one.content + '\n\n' }}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(path, read_settings(tmp_path))
    for one in (tokenizer, stored(tokenizer, tmp_path / "stored")):
        chat = ChatFormat(one)
        assert chat.encode([("user", "a <|turn|>")]).ids == ()
        with pytest.raises(PromptError, match=r"writes the token '<\|turn\|>', which its tokenizer lacks") as caught:
            chat.encode([("user", "a"), ("assistant", "b")])
        assert hint in caught.value.hint


@pytest.mark.parametrize(
    "added_tokens", ['{"im_start": 700}', "", "[]"], ids=["a part of a token", "empty", "no names"]
)
def test_other_names_of_added_tokens_refuse_no_chat(added_tokens: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json("Qwen"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "added_tokens.json").write_text(added_tokens)
    (tmp_path / "chat_template.jinja").write_text("{{ '<|im_start|>' + messages[0].content }}")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", read_settings(tmp_path))
    chat = ChatFormat(tokenizer).encode([("user", "a")])
    assert [*chat.ids, *chat.rest_ids] == [
        tokenizer.marks["<|im_start|>"].id,
        *tokenizer.encode_run("a", is_inner=True),
    ]


def test_beside_another_tokenizer_model_the_json_is_chosen(tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path) is None
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_text("IQ== 0\n")
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.json"


def test_the_files_beside_it_say_how_a_tokenizer_is_used(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    own = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    names = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|im_end|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own | names))
    (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    (weights / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}, "vocab_size": 700}))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 600}))
    settings = read_settings(tmp_path, weights)
    assert settings.num_rows == 700, "those of the folder with the weights"
    tokenizer = opened("Qwen", settings)

    assert settings.chat_template == "d"
    assert settings.names == {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}
    assert tokenizer.end_ids == (5, 7, tokenizer.marks["<|im_end|>"].id)
    (weights / "chat_template.jinja").write_text("j")
    assert read_settings(tmp_path, weights).chat_template == "j"


@pytest.mark.parametrize(
    ("kind", "names"), [(SENTENCEPIECE, {"tokenizer.model"}), ("Llama 3", {"tokenizer.json", "tokenizer_config.json"})]
)
def test_a_stored_tokenizer_is_the_same(tmp_path: Path, kind: str, names: set[str]) -> None:
    tokenizer = opened(kind)
    again = stored(tokenizer, tmp_path)

    assert set(tokenizer.files) == names
    assert (again.data, again.end_ids, again.marks) == (tokenizer.data, tokenizer.end_ids, tokenizer.marks)
    assert again.settings.chat_template == tokenizer.settings.chat_template
    assert again.template_names == tokenizer.template_names


def test_the_begin_token_of_an_old_configuration_is_no_end(tmp_path: Path) -> None:
    settings = TokenizerSettings(end_ids=(1, 2))
    assert Tokenizer.from_bytes(sentencepiece_model(), settings=settings).end_ids == (2,)
    added = TokenizerSettings(names={"eos_token": "<|im_end|>"})
    earlier = Tokenizer.from_bytes(sentencepiece_model(), settings=added)  # as in bundles of earlier versions
    assert stored(earlier, tmp_path).end_ids == earlier.end_ids
    with pytest.raises(CheckpointError, match=r"lacks the token '<\|im_end\|>', by which its"):
        Tokenizer.load(tmp_path / "tokenizer.model", added)
    with pytest.raises(CheckpointError, match="Nothing says which token of `x` ends a text"):
        Tokenizer.from_bytes(tokenizer_json("Qwen"), name="x")


@pytest.mark.parametrize("kind", ["Qwen", "Llama 3", SENTENCEPIECE])  # Qwen's begins texts with no token
@pytest.mark.parametrize("begins", [True, False])
def test_texts_begin_as_in_transformers(kind: str, begins: bool, tmp_path: Path) -> None:
    is_model = kind == SENTENCEPIECE
    path = tmp_path / ("tokenizer.model" if is_model else "tokenizer.json")
    path.write_bytes(sentencepiece_model() if is_model else tokenizer_json(kind))
    begin = 1 if is_model else of_its_library(kind).token_to_id("<|begin_of_text|>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [begin, 2]}))
    names = {"bos_token": "<s>", "eos_token": "</s>"} if is_model else {"bos_token": "<|begin_of_text|>"}
    values = {"tokenizer_class": "LlamaTokenizer" if is_model else "PreTrainedTokenizerFast", "add_bos_token": begins}
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(values | names))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    settings.write_text(settings.read_text(), encoding="utf-8-sig")  # as some editors write
    tokenizer = Tokenizer.load(path, read_settings(tmp_path))

    assert tokenizer.encode("a red circle") == theirs("a red circle")["input_ids"]
    assert tokenizer.end_ids == ((begin, 2) if kind == "Qwen" else (2,)), "a token that begins texts ends none"
    again = stored(tokenizer, tmp_path)
    assert (again.begin_ids, again.bos_id, again.end_ids) == (
        tokenizer.begin_ids,
        tokenizer.bos_id,
        tokenizer.end_ids,
    )


NEW = "<|new|>"


@pytest.mark.parametrize(
    ("token", "template", "names", "is_left_out"),
    [
        (tokenizers.AddedToken(NEW, special=True), "", {"image_token": NEW, "pad_token": NEW}, True),
        (tokenizers.AddedToken(NEW, special=False), "", {}, False),
        (tokenizers.AddedToken(NEW, special=True), "{{ '<|new|>' }}", {}, False),
        (tokenizers.AddedToken(NEW, special=True), "{{ pad_token }}", {"pad_token": NEW}, False),
        (tokenizers.AddedToken(NEW, special=True), "", {"eos_token": NEW}, False),
        (tokenizers.AddedToken(NEW, special=True), "", {"bos_token": NEW}, False),
        (tokenizers.AddedToken(NEW, special=True), "", {"fake_image_token": NEW}, False),
        *(
            (tokenizers.AddedToken(name, special=True), "", {}, False)  # in the text of a picture
            for name in ("<row_1_col_2>", "<global-img>", "<fake_token_around_image>")
        ),
    ],
)
@pytest.mark.parametrize("is_part", [False, True])
def test_special_tokens_beyond_the_models_are_left_out_if_nothing_writes_them(
    token: Any, template: str, names: dict[str, str], is_left_out: bool, is_part: bool, tmp_path: Path
) -> None:
    made = of_its_library("Qwen")
    rows = made.get_vocab_size()
    made.add_tokens([token])
    config = {"vocab_size": rows, "eos_token_id": 2}
    whole = {"text_config": config, "eos_token_id": None, "vocab_size": rows + 5}  # an entry from before a change
    (tmp_path / "config.json").write_text(json.dumps(whole if is_part else config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "chat_template.jinja").write_text(template or "{{ messages }}")
    (tmp_path / "tokenizer.json").write_text(made.to_str(), encoding="utf-8-sig")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", read_settings(tmp_path))

    assert tokenizer.vocab_size == rows + (not is_left_out)
    assert tokenizer.end_ids[0] == 2
    assert tokenizer.encode("a <|new|> b")[:2] == made.encode("a <").ids[:2]
    assert tokenizer.decode(tokenizer.encode("a <|im_end|> b")) == "a <|im_end|> b"
    assert Tokenizer.from_bytes(tokenizer.data, settings=tokenizer.settings).marks == tokenizer.marks


@pytest.mark.parametrize("template", ["", "<|im_start|>"])
def test_tokens_beyond_the_models_are_left_out_behind_the_last_that_is_written(template: str) -> None:
    content = json.loads(tokenizer_json("Llama 3"))
    content["added_tokens"] = [one for one in content["added_tokens"] if one["special"]]
    ids = {one["content"]: one["id"] for one in content["added_tokens"]}
    begin = ids["<|begin_of_text|>"]  # the file's post-processor writes it
    settings = TokenizerSettings(end_ids=(2,), num_rows=begin, chat_template=template)
    tokenizer = Tokenizer.from_bytes(json.dumps(content).encode(), settings=settings)
    last = ids[template] if template else begin
    assert {name: mark.id for name, mark in tokenizer.marks.items()} == {
        name: one for name, one in ids.items() if one <= last
    }
    assert begin < last < max(ids.values()) or not template
    assert tokenizer.encode("a")[0] == begin


def test_a_decoder_by_which_texts_depend_on_neighbours_is_refused() -> None:
    content = json.loads(tokenizer_json("Qwen")) | {"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}
    with pytest.raises(CheckpointError, match="has the decoder BPEDecoder"):
        Tokenizer.from_bytes(json.dumps(content).encode())


# The golden tokenizer of 512 pieces

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = GOLDEN / "LLaMA" / "tokenizer.model"
TOKENIZER = Tokenizer.load(MODEL)
CASES = json.loads((GOLDEN / "cases.json").read_text())["tokenizer"]


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: repr(case["text"]))
def test_encode_gives_the_reference_ids(case: dict[str, object]) -> None:
    assert TOKENIZER.encode(str(case["text"])) == case["ids_bos"]


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: str(case["ids"]))
def test_decode_gives_the_reference_text(case: dict[str, list[int]]) -> None:
    assert TOKENIZER.decode(case["ids"]) == case["text"]


def test_odd_texts_of_the_golden_tokenizer() -> None:
    assert [TOKENIZER.bos_id, *TOKENIZER.encode("a boat", bos=False)] == TOKENIZER.encode("a boat")

    with pytest.raises(ValueError, match=r"character 2 is half a surrogate pair \(U\+D800\)"):
        TOKENIZER.encode("ab\ud800")

    stream = IncrementalDetokenizer(TOKENIZER)
    parts = [stream.push(3 + byte) for byte in "🙂".encode()]
    assert parts == ["", "", "", "🙂"]

    space = TOKENIZER.encode("", bos=False) or TOKENIZER.encode("\n", bos=False)[:1]
    assert TOKENIZER.encode("Yes", bos=False)[:1] == space
    assert TOKENIZER.decode([300, *TOKENIZER.encode_continuation(None, "Yes")]) == "asYes"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for piece_id in (-1, 512):
        with pytest.raises(ValueError, match=f"Token id {piece_id} is outside the tokenizer's vocabulary of 512"):
            TOKENIZER.decode([300, piece_id])
        with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
            IncrementalDetokenizer(TOKENIZER).push(piece_id)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.text(max_size=12), st.text(max_size=12))
def test_continuation_follows_the_prompt_as_in_one_text(prompt: str, text: str) -> None:
    alone = TOKENIZER.encode(prompt, bos=False)
    joint = TOKENIZER.encode(prompt + text, bos=False)
    continuation = TOKENIZER.encode_continuation(prompt, text)
    if joint[: len(alone)] == alone:
        assert alone + continuation == joint
    else:
        assert continuation == TOKENIZER.encode_continuation(None, text)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
        (b'{"version": "1.0"}', "is no tokenizer.json: Model missing"),
        (b"IQ== 0\nIg== 1\n", "a table of 2 byte ranks, and that of Llama 3 has 128,000"),
        (b"\x00garbage" * 40, "not a SentencePiece model"),
        (MODEL.read_bytes()[:3000], "not a SentencePiece model"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=reason) as caught:
        Tokenizer.load(path)
    assert caught.value.hint

    with pytest.raises(CheckpointError, match=r"`.*absent\.model`"):
        Tokenizer.load(tmp_path / "absent.model")
