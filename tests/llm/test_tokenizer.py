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
