"""Prompts with pictures as tokens have transformers' ids, and no text of a user becomes a picture."""

from typing import Any

import pytest
import tokenizers
import transformers
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from llama_adapter.app.captioning.tasks.prompts import Dialogue, Prompt, PromptEncoder, RawPrompt
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.picture_format import FRAME, Grid, PictureFormat
from llama_adapter.llm.pieces.folder import TokenizerSettings
from llama_adapter.llm.tokenizer import Tokenizer
from tests.app.picture_models import LLAVA, SMOLVLM
from tests.llm.vocabularies import tokenizer_json

# Of models whose templates take texts.
TEXT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}<|im_start|>a\n"
OWN_PICTURE = TEXT.replace("{{ m.content", "{% if loop.last %}<image>{% endif %}{{ m.content")
TEMPLATES = {"LLaVA": LLAVA, "SmolVLM": SMOLVLM, "texts": TEXT, "writes its own": OWN_PICTURE}
GRIDS: tuple[tuple[Grid, ...], ...] = ((), ((0, 0),), ((2, 3),), ((0, 0), (1, 2)))
EACH = 4


def vocabulary(kind: str, *, has_rows: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(tokenizer_json(kind).decode())
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)] + ["<global-img>"]
    names = ["<image>", FRAME, *(rows if has_rows else [])]
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return made


def encoder(template: str | None, *, kind: str = "Llama 3", frame: str = FRAME, has_rows: bool = True) -> PromptEncoder:
    made = vocabulary(kind, has_rows=has_rows)
    settings = TokenizerSettings(end_ids=(2,), chat_template=template, names={"bos_token": "<|begin_of_text|>"})
    form = PictureFormat(token="<image>", token_id=made.token_to_id("<image>"), tokens_each=EACH, frame=frame)
    return PromptEncoder(
        Tokenizer.from_bytes(made.to_str().encode(), settings=settings),
        check=lambda ids, continuations: None,
        template="instruction" if template is None else "chat",
        pictures=form,
    )


def expanded(text: str, grids: tuple[Grid, ...], *, frame: str) -> str:
    """What the processors of transformers make of a chat: each picture's token becomes its text."""
    for grid in grids:
        own = get_image_prompt_string(*grid, EACH, FRAME, "<picture>", "<global-img>") if frame else "<picture>" * EACH
        text = text.replace("<image>", own, 1)
    return text.replace("<picture>", "<image>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["Llama 3", "Llama 2", "Qwen"])
@pytest.mark.parametrize("has_rows", [True, False])
def test_a_prompt_has_the_ids_of_transformers(name: str, kind: str, has_rows: bool) -> None:
    frame = "" if name == "LLaVA" else FRAME
    ours = encoder(TEMPLATES[name], kind=kind, frame=frame, has_rows=has_rows)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabulary(kind, has_rows=has_rows), bos_token="<|begin_of_text|>"
    )
    turns: list[tuple[str, str]] = [("system", "Be brief."), ("user", "What?"), ("assistant", "A cat.")]
    for grids in GRIDS[1:2] if name == "writes its own" else GRIDS:
        grids = grids if frame else ((0, 0),) * len(grids)
        for earlier in ((), tuple(turns)):
            messages: list[dict[str, Any]] = []
            for role, text in (*earlier, ("user", "\nHow many\n there?")):
                images = len(grids) if text.endswith("there?") else 0
                parts: Any = [*[{"type": "image"}] * images, {"type": "text", "text": text}]
                in_text = "" if name == "writes its own" else "<image>\n" * images
                messages.append({"role": role, "content": parts if name in ("LLaVA", "SmolVLM") else in_text + text})
            chat = theirs.apply_chat_template(
                messages, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
            )
            # As `ProcessorMixin.apply_chat_template`, which begins a text unless the template does.
            expected = theirs(expanded(chat, grids, frame=frame), add_special_tokens=True)["input_ids"]

            found = ours.encode(Dialogue(earlier, "\nHow many\n there?"), grids=grids)  # type: ignore[arg-type]

            assert list(found.token_ids) == expected
            places = [place for place, one in enumerate(expected) if one == theirs.convert_tokens_to_ids("<image>")]
            assert list(found.picture_starts) == places[::EACH]
            assert len(places) == EACH * sum(rows * columns + 1 for rows, columns in grids)


SPELLED = f"<image>{FRAME}<row_1_col_1><image>"


@pytest.mark.parametrize("template", [LLAVA, SMOLVLM, TEXT, None], ids=["LLaVA", "SmolVLM", "texts", "none"])
def test_no_text_becomes_a_picture(template: str | None) -> None:
    ours, grids = encoder(template), ((1, 2),)
    prompts: list[Prompt] = [SPELLED, (SPELLED, SPELLED), RawPrompt(SPELLED), Dialogue((("user", SPELLED),), SPELLED)]
    for prompt in prompts:
        found = ours.encode(prompt, grids=grids)
        plain = ours.encode("What?", grids=grids)
        image = found.token_ids[found.picture_starts[0]]
        assert found.token_ids.count(image) == plain.token_ids.count(image) == 3 * EACH
        assert ours.encode(prompt).token_ids.count(image) == 0
    with pytest.raises(PromptError, match="`<image>` 13 times, and its pictures 12"):
        ours.encode([image, 5], grids=grids)
    with pytest.raises(PromptError, match="`<image>` 1 times, and its pictures 0"):
        ours.encode([5, image])


def test_ids_and_plain_text_follow_their_pictures() -> None:
    ours = encoder(None, frame="")
    begin = ours._tokenizer.encode("")
    [image] = {ours.encode("a", grids=((0, 0),)).token_ids[1]}
    pictures = [image] * 2 * EACH

    grids: tuple[Grid, ...] = ((0, 0), (0, 0))
    assert [*ours.encode(RawPrompt("ab c"), grids=grids).token_ids] == [
        *begin,
        *pictures,
        *ours._tokenizer.encode_run("ab c", is_inner=True),
    ]
    for ids in ([*begin, 5, 6], [5, 6]):
        assert [*ours.encode(ids, grids=grids).token_ids] == [*begin, *pictures, 5, 6]


def test_pictures_are_not_cut_and_have_places_in_the_template() -> None:
    ours = encoder(LLAVA, frame="")
    whole = ours.encode("one two three four five", grids=((0, 0),))
    first = whole.picture_starts[-1] + EACH
    cut = ours.encode("one two three four five", grids=((0, 0),), max_tokens=first + 3)

    assert cut.token_ids == whole.token_ids[:first] + whole.token_ids[-3:]
    assert cut.num_cut == len(whole.token_ids) - first - 3
    with pytest.raises(PromptError, match="pictures in its first"):
        ours.encode("one two three four five", grids=((0, 0),), max_tokens=first)
    with pytest.raises(PromptError, match="has 1 places for pictures in this chat, and it has 2"):
        encoder(OWN_PICTURE).encode("What?", grids=((0, 0), (0, 0)))


@pytest.mark.parametrize("name", ["LLaVA", "SmolVLM", "texts"])
def test_pictures_stand_where_their_turns_have_them(name: str) -> None:
    frame = "" if name == "LLaVA" else FRAME
    ours, words = encoder(TEMPLATES[name], frame=frame), vocabulary("Llama 3", has_rows=True)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|begin_of_text|>")
    grids: tuple[Grid, ...] = ((0, 0),) * 5 if name == "LLaVA" else ((1, 2), (0, 0), (2, 3), (0, 0), (1, 1))
    # A number stands for so many pictures.
    said: list[tuple[str, list[str | int]]] = [
        ("user", ["What is", 1, " and what ", 1]),
        ("user", [1]),
        ("assistant", ["A cat."]),
        ("user", [1, "And ", 1, "this?"]),
    ]
    messages = []
    for role, parts in said:
        own: list[Any] = [{"type": "image"} if part == 1 else {"type": "text", "text": part} for part in parts]
        in_text = "".join("<image>\n" if part == 1 else str(part) for part in parts)
        messages.append({"role": role, "content": in_text if name == "texts" else own})
    whole = theirs.apply_chat_template(
        messages, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False
    )
    turns = (("system", ""), ("user", "What is and what "), ("user", ""), ("assistant", "A cat."))
    places = ((), (7, 17), (0,), (), (0, 4))
    found = ours.encode(Dialogue(turns, "And this?", places), grids=grids)  # type: ignore[arg-type]

    assert list(found.token_ids) == theirs(expanded(str(whole), grids, frame=frame))["input_ids"]
