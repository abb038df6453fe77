"""The guarantees of the tokenizer and its incremental decoder, with the golden tokenizer of 512 pieces."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_adapter.llm.tokenizer import IncrementalDetokenizer, Tokenizer
from llama_adapter.runtime.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = GOLDEN / "LLaMA" / "tokenizer.model"
TOKENIZER = Tokenizer.load(MODEL)
CASES = json.loads((GOLDEN / "cases.json").read_text())["tokenizer"]
# Byte pieces are frequent here, and with them complete and incomplete characters.
_BYTES = st.integers(3, 258)
_CHARACTERS = st.text(min_size=1, max_size=3).map(lambda text: [3 + byte for byte in text.encode()])
_IDS = st.lists(
    st.one_of(st.integers(0, 511).map(lambda i: [i]), _BYTES.map(lambda i: [i]), _CHARACTERS), max_size=24
).map(lambda runs: [piece_id for run in runs for piece_id in run])


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: repr(case["text"]))
def test_encode_gives_the_reference_ids(case: dict[str, object]) -> None:
    assert TOKENIZER.encode(str(case["text"])) == case["ids_bos"]


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: str(case["ids"]))
def test_decode_gives_the_reference_text(case: dict[str, list[int]]) -> None:
    assert TOKENIZER.decode(case["ids"]) == case["text"]


def test_encode_without_bos_differs_only_by_it() -> None:
    assert [TOKENIZER.bos_id, *TOKENIZER.encode("a boat", bos=False)] == TOKENIZER.encode("a boat")


@pytest.mark.parametrize("piece_id", [-1, 512, 32000])
def test_ids_outside_the_vocabulary_are_refused(piece_id: int) -> None:
    with pytest.raises(ValueError, match=f"Token id {piece_id} is outside the tokenizer's vocabulary of 512"):
        TOKENIZER.decode([300, piece_id])
    with pytest.raises(ValueError, match="outside the tokenizer's vocabulary"):
        IncrementalDetokenizer(TOKENIZER).push(piece_id)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"character 2 is half a surrogate pair \(U\+D800\)"):
        TOKENIZER.encode("ab\ud800")


@settings(max_examples=200, deadline=None)
@given(_IDS)
def test_streamed_text_equals_decoded_text_for_any_ids(ids: list[int]) -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    parts = [stream.push(piece_id) for piece_id in ids]
    assert "".join([*parts, stream.flush()]) == TOKENIZER.decode(ids)


@settings(max_examples=200, deadline=None)
@given(_IDS)
def test_a_peek_shows_the_next_text_or_the_name_of_the_piece(ids: list[int]) -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    for piece_id in ids:
        shown, _ = stream.peek(piece_id), stream.peek(400)
        assert shown == (stream.push(piece_id) or TOKENIZER.name_of(piece_id))
    assert IncrementalDetokenizer(TOKENIZER).peek(TOKENIZER.eos_id) == "</s>"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_a_stream_of_valid_text_never_shows_half_a_character(text: str) -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    ids = TOKENIZER.encode(text)
    whole = TOKENIZER.decode(ids)
    shown = ""
    for piece_id in ids:
        shown += stream.push(piece_id)
        assert whole.startswith(shown)


def test_a_character_of_several_bytes_appears_with_its_last_byte() -> None:
    stream = IncrementalDetokenizer(TOKENIZER)
    parts = [stream.push(3 + byte) for byte in "🙂".encode()]
    assert parts == ["", "", "", "🙂"]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.text(max_size=12))
def test_continuation_follows_the_prompt_as_in_one_text(prompt: str, text: str) -> None:
    alone = TOKENIZER.encode(prompt, bos=False)
    joint = TOKENIZER.encode(prompt + text, bos=False)
    continuation = TOKENIZER.encode_continuation(prompt, text)
    if joint[: len(alone)] == alone:
        assert alone + continuation == joint
    else:
        assert continuation == TOKENIZER.encode_continuation(None, text)


def test_continuation_of_no_prompt_has_no_space_in_front() -> None:
    space = TOKENIZER.encode("", bos=False) or TOKENIZER.encode("\n", bos=False)[:1]
    assert TOKENIZER.encode("Yes", bos=False)[:1] == space
    assert TOKENIZER.decode([300, *TOKENIZER.encode_continuation(None, "Yes")]) == "asYes"


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


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`.*absent\.model`"):
        Tokenizer.load(tmp_path / "absent.model")


def test_tokenizer_from_bytes_is_the_same_tokenizer() -> None:
    again = Tokenizer.from_bytes(TOKENIZER.data)
    assert again.encode("a boat") == TOKENIZER.encode("a boat")
