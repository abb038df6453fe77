"""Chat templates of models give the ids that transformers gives, no text becomes a special token, and limits hold."""

import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import tokenizers
import transformers

from llama_adapter.llm import chat_template
from llama_adapter.llm.chat import ChatFormat, ChatIds
from llama_adapter.llm.chat_template import TemplateProcess
from llama_adapter.llm.conversation import Turn
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.pieces.folder import TokenizerSettings
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import UsageError
from tests.llm.vocabularies import sentencepiece_model, texts, tokenizer_json

# Short templates with what those of the families do.
CHATML = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif -%}\n"
    "{%- for message in messages -%}\n    {%- generation -%}\n"
    "    {{- '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>' + '\n' -}}\n"
    "    {%- endgeneration -%}\n{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_3 = (
    "{{- bos_token }}{% set when = strftime_now('%d %b %Y') %}{{ 'Today Date: ' + when }}"
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '<|im_end|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_end|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\n\n' -%}"
    "{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
    "{%- for message in rest -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' }}"
    "{{- first if loop.first else '' }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
QWEN_3 = (  # what was thought in earlier turns is left out
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
GEMMA_2 = GEMMA.replace(
    "{%- set first = messages[0]['content'] + '\n\n' -%}{%- set rest = messages[1:] -%}",
    "{{ raise_exception('System role not supported') }}",
)
ONLY_USERS = "{% for one in messages if one.role == 'user' %}{{ '[INST] ' + one.content + ' [/INST]' }}{% endfor %}"
FIRST_SYSTEM = (  # only the first message
    "{{ '<<SYS>>' + messages[0].content + '<</SYS>>' if messages[0].role == 'system' else '' }}" + ONLY_USERS
)
LIST_OF_PARTS = (  # as templates of models with pictures
    "{% if messages[1:] and messages[1].role == 'system' %}{{ raise_exception('one system') }}{% endif %}"
    "{% for one in messages %}{{ '[' + one.role + ']' }}{% for part in one.content %}"
    "{{ '(' + part.text + ')' if part.type == 'text' else '<unk>' }}{% endfor %}{% endfor %}"
)
FAMILIES = {
    "ChatML": (CHATML, "Qwen", "<|im_end|>"),
    "Llama 3": (LLAMA_3, "Llama 3", "<|eot_id|>"),
    "Gemma": (GEMMA, "Llama 2", "<end_of_turn>"),
    "Mistral": (MISTRAL, "Llama 2", "</s>"),
    "newer Mistral": (MISTRAL, "Mistral", "</s>"),
    "Qwen 3": (QWEN_3, "Qwen", "<|im_end|>"),
}
NOW = datetime(2025, 2, 3, 4, 5)
CHATS: tuple[tuple[Turn, ...], ...] = (
    (("user", "What is it?"),),
    (("user", "  two \n\n"), ("assistant", "\n\nYes.  "), ("user", "\n\u2003Why {{ 7 }} {% x %}?")),
    (("user", "a"), ("assistant", "<think>\nred\n</think>\n\nblue"), ("user", "\U0001f642 привет")),
    (("user", ""), ("assistant", "Sorry?"), ("user", "ok")),
)
_FORMATS: dict[str, ChatFormat] = {}


def format_of(family: str) -> ChatFormat:
    if family not in _FORMATS:
        _FORMATS[family] = ChatFormat(tokenizer_of(family))
    return _FORMATS[family]


def tokenizer_of(family: str) -> Tokenizer:
    template, kind, end = FAMILIES[family]
    names = {"bos_token": "<|begin_of_text|>", "eos_token": end}
    settings = TokenizerSettings(chat_template=template, names=names)
    return Tokenizer.from_bytes(tokenizer_json(kind), settings=settings)


def ids_of(family: str, turns: tuple[Turn, ...]) -> list[int]:
    chat = format_of(family).encode(turns, now=NOW)
    return [*chat.ids, *chat.rest_ids]


@pytest.fixture
def fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Fixed)


@pytest.mark.usefixtures("fixed_date")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.proves("chat templates", "CPU")
def test_a_chat_has_the_ids_of_transformers(family: str) -> None:
    template, kind, end = FAMILIES[family]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json(kind).decode()),
        bos_token="<|begin_of_text|>",
        eos_token=end,
        chat_template=template,
    )
    systems: tuple[tuple[Turn, ...], ...] = () if "Mistral" in family else ((("system", "Be brief."), *CHATS[0]),)
    for turns in (*CHATS, *systems):
        messages = [{"role": role, "content": text} for role, text in turns]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        # Spelled marks are text here, and special tokens there.
        is_spelled = any(mark in text for _, text in turns for mark in tokenizer_of(family).marks)
        if family == "Qwen 3" or not is_spelled:
            assert ids_of(family, turns) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_of_a_chat_becomes_a_special_token(family: str) -> None:
    tokenizer, draw = tokenizer_of(family), random.Random(0)
    marks = [name for name in tokenizer.marks if name != "<unk>"]
    special = {tokenizer.marks[name].id for name in marks}
    plain = Counter(one for one in ids_of(family, (("user", "a"), ("assistant", "b"), ("user", "c"))) if one in special)
    for number, text in enumerate(texts(170, longest=2)):
        first, second = draw.choices(marks, k=2)
        spelled = [
            f"{text}{first}\n{second}{text}",
            f"{first[:2]}{second}{first[2:]}",
            f"</think>{first}" if number % 2 else f"\ue000{first}\ue0000\ue001{second}",
        ]
        found = ids_of(family, (("user", spelled[0]), ("assistant", spelled[2]), ("user", spelled[1])))
        assert Counter(one for one in found if one in special) == plain
        decoded = tokenizer.decode(found)
        if family == "ChatML":  # whose template leaves texts as they are
            assert all(one in decoded for one in spelled)


def test_marks_take_the_white_space_that_is_theirs() -> None:
    made = tokenizers.Tokenizer.from_str(tokenizer_json("Llama 2").decode())
    made.add_special_tokens(
        [tokenizers.AddedToken("<|user|>", rstrip=True), tokenizers.AddedToken("<|x|>", lstrip=True)]
    )
    template = "{% for m in messages %}{{ '<|user|>\n' + m.content + ' <|x|>' }}{% endfor %}{{ '<|user|>\n' }}"
    settings = TokenizerSettings(end_ids=(2,), chat_template=template)
    chat = ChatFormat(Tokenizer.from_bytes(made.to_str().encode(), settings=settings)).encode([("user", " a b ")])

    assert [*chat.ids, *chat.rest_ids] == made.encode("<|user|>\n a b  <|x|><|user|>\n", add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_follows_as_in_the_whole_chat(family: str) -> None:
    form = format_of(family)
    chat = form.encode([("user", "What?")], now=NOW)
    whole = chat.rest + "blue square"

    assert [*chat.rest_ids, *form.continue_chat(chat, "blue square")] == form._tokenizer.encode_run(
        whole, is_inner=True
    )
    assert form.end_id == form._tokenizer.marks[FAMILIES[family][2]].id


def test_a_sentencepiece_model_has_chats_too() -> None:
    settings = TokenizerSettings(chat_template=MISTRAL, names={"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = Tokenizer.from_bytes(sentencepiece_model(), settings=settings)
    chat = ChatFormat(tokenizer).encode([("user", "a"), ("assistant", "b </s>"), ("user", "c")])
    expected = [
        1,
        *tokenizer.encode("[INST] a [/INST]b </s>", bos=False),
        2,
        *tokenizer.encode("[INST] c [/INST]", bos=False),
    ]

    assert [*chat.ids, *chat.rest_ids] == expected
    with pytest.raises(UsageError, match="no chat template"):
        ChatFormat(Tokenizer.from_bytes(sentencepiece_model()))


def form_of(template: str, *, picture: str = "") -> ChatFormat:
    settings = TokenizerSettings(chat_template=template, names={"eos_token": "</s>"})
    return ChatFormat(Tokenizer.from_bytes(tokenizer_json("Llama 2"), settings=settings), picture=picture)


@pytest.mark.parametrize("template", [GEMMA_2, ONLY_USERS])
def test_texts_of_the_system_precede_the_question_where_a_template_has_no_place_for_them(template: str) -> None:
    form = form_of(template)
    rest: tuple[Turn, ...] = (("assistant", "Yes."), ("user", "Why?"))
    chat = form.encode([("system", "Be brief."), ("user", "What?"), *rest])

    assert chat == form.encode([("user", "Be brief.\n\nWhat?"), *rest])
    late = form.encode([("user", "What?"), ("system", "Be brief."), ("system", "In French.")])
    assert late == form.encode([("user", "Be brief.\n\nIn French.\n\nWhat?")])
    if template == GEMMA_2:
        with pytest.raises(PromptError, match="roles must alternate"):
            form.encode([("system", "Be brief."), *rest])


@pytest.mark.parametrize("template", [GEMMA, FIRST_SYSTEM, LIST_OF_PARTS])
def test_texts_of_the_system_are_one_where_a_template_has_a_place_for_one(template: str) -> None:
    form = form_of(template, picture="<unk>" if template == LIST_OF_PARTS else "")
    one = form.encode([("system", "Be brief.\n\nIn French."), ("user", "What?")])

    assert form.encode([("system", "Be brief."), ("system", "In French."), ("user", "What?")]) == one
    if template == FIRST_SYSTEM:
        assert form.encode([("system", "Be brief."), ("user", "What?"), ("system", "In French.")]) == one


def test_whether_a_template_shows_the_system_may_depend_on_values() -> None:
    form = form_of(
        "{% if old is defined and messages[0].role == 'system' %}{{ raise_exception('old') }}{% endif %}" + CHATML
    )
    chat: list[Turn] = [("system", "Be brief."), ("user", "What?")]

    moved = form.encode(chat, values={"old": True})
    assert moved == form.encode([("user", "Be brief.\n\nWhat?")])
    assert form.encode(chat) != moved


def test_a_system_s_text_and_the_user_s_are_one_part_where_a_template_has_no_place_for_the_system() -> None:
    form = form_of(LIST_OF_PARTS.replace("messages[1:] and messages[1]", "messages[0]"), picture="<unk>")
    pictures = {1: [(5, "<unk>")]}
    moved = form.encode([("system", "Be brief."), ("user", "What?")], pictures=pictures)
    assert moved == form.encode([("user", "Be brief.\n\nWhat?")], pictures={0: [(16, "<unk>")]})


@pytest.mark.parametrize(
    ("template", "picture", "ask"),
    [
        (GEMMA_2, "", lambda form: form.encode([("system", "Be brief."), ("user", "What?")])),
        (GEMMA_2, "", lambda form: form.end_id),
        (LIST_OF_PARTS, "<unk>", lambda form: form.encode([("user", "What?")], pictures={0: [(0, "<unk>")]})),
    ],
    ids=["arrangements", "end", "forms of content"],
)
def test_a_limit_is_no_refusal(
    template: str, picture: str, ask: Callable[[ChatFormat], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(template, picture=picture)
    render, outcomes = form._process.render, iter([PromptError("The template took too long")])
    calls = []

    def limited_once(*args: Any, **options: Any) -> list[str]:
        calls.append(args)
        for error in outcomes:
            raise error
        return render(*args, **options)

    monkeypatch.setattr(form._process, "render", limited_once)
    with pytest.raises(PromptError, match="took too long"):
        ask(form)
    assert len(calls) == 1
    assert ask(form) == ask(form_of(template, picture=picture))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([("system", "Be brief."), ("user", "#What?#")], [("user", "Be brief.\n\n#What?#")]),
        (
            [("user", "#What?"), ("system", "Be brief."), ("user", "#?")],
            [("user", "Be brief.\n\n#What?"), ("user", "#?")],
        ),
        ([("user", "#What?"), ("system", "#Be brief.")], None),
        ([("system", "#Be brief."), ("user", "#What?")], [("user", "#Be brief.\n\n#What?")]),
        (
            [("system", "#Be brief."), ("user", "What?"), ("system", "In French.")],
            [("user", "#Be brief.\n\nIn French.\n\nWhat?")],
        ),
        ([("system", "#A"), ("assistant", "#Yes."), ("user", "#B")], None),
        ([("assistant", "#Yes."), ("system", "#A"), ("user", "#B")], [("assistant", "#Yes."), ("user", "#A\n\n#B")]),
        ([("assistant", "Yes."), ("system", "#A"), ("user", "#B")], [("assistant", "Yes."), ("user", "#A\n\n#B")]),
        ([("assistant", "#Yes."), ("system", "A"), ("user", "#B")], [("assistant", "#Yes."), ("user", "A\n\n#B")]),
    ],
)
def test_pictures_keep_their_order_when_texts_of_the_system_move(before: list[Turn], after: list[Turn] | None) -> None:
    form = form_of(ONLY_USERS.replace("one.role == 'user'", "one.role != 'system'"), picture="<unk>")

    def encoded(turns: list[Turn]) -> ChatIds:
        names = iter("abc")
        texts = [(role, text.replace("#", "")) for role, text in turns]
        pictures = {
            number: [(at - nth, f"<unk>{next(names)}") for nth, at in enumerate(places(text))]
            for number, (_, text) in enumerate(turns)
        }
        return form.encode(texts, pictures=pictures)

    def places(text: str) -> list[int]:
        return [at for at, letter in enumerate(text) if letter == "#"]

    if after is not None:
        assert encoded(before) == encoded(after)
    else:
        with pytest.raises(PromptError, match="leaves out texts of the system"):
            encoded(before)


# The process that renders


def rendered(template: str, *turns: Turn, **options: Any) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    [text] = TemplateProcess(template, {"bos_token": "<s>"}).render([messages], **options)
    return text


def test_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{{ bos_token }}{{ messages | tojson }}{{ {'b': 'é<', 'a': [1]} | tojson(indent=1, sort_keys=true) }}"
        "{%- for n in range(9) %}{% if n == 2 %}{% continue %}{% endif %}{% if n == 4 %}{% break %}{% endif %}{{ n }}"
        "{% endfor %}{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{{ tools is none }}"
    )
    theirs = transformers.utils.chat_template_utils._compile_jinja_template(template)
    messages = [{"role": "user", "content": "ä"}]

    assert rendered(template, ("user", "ä")) == theirs.render(messages=messages, bos_token="<s>", tools=None)
    assert rendered("{{ strftime_now('%Y-%m-%d %H') }}", now=NOW) == "2025-02-03 04"
    assert rendered("{{ add_generation_prompt }}", asks=False) == "False"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", r"did not end within 1 s"),
        ("{% for a in range(99999) %}{{ 'aaaaaaaaaa' * 100 }}{% endfor %}", r"writes more than 4,000,000 characters"),
        ("{{ 'a' * 3000000000 }}", "needs too much memory"),
        ("{{ raise_exception('only users') }}", "refuses this chat: only users"),
        ("{% if %}", "is no Jinja template"),
        ("{{ messages[7].content + 1 }}", "has no attribute 'content'|has no element 7"),
        ("{{ messages.append(1) }}", "refuses this chat: "),
        ("{{ ''.__class__.__mro__ }}", "refuses this chat: .*unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError|was ended"),
    ],
)
def test_a_template_that_fails_says_why(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 1.0 if "did not end" in reason else 60.0)
    with pytest.raises(PromptError, match=f"The model's chat template .*({reason})") as caught:
        rendered(template, ("user", "a"))
    assert "--prompt-template" in caught.value.hint


def test_another_process_is_started_for_one_that_has_ended() -> None:
    process = TemplateProcess("{{ messages[0].content }}", {})
    assert process.render([[{"role": "user", "content": "a"}]]) == ["a"]
    child = process._child
    assert child is not None
    child.process.kill()
    child.process.wait()

    assert process.render([[{"role": "user", "content": "b"}]] * 2) == ["b", "b"]
    assert process._child is not child


def test_the_process_ends_with_its_template() -> None:
    process = TemplateProcess("{{ 1 }}", {})
    process.render([[]])
    assert process._child is not None
    popen = process._child.process
    del process
    deadline = time.monotonic() + 10
    while popen.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert popen.returncode is not None
