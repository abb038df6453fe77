"""Turns a conversation into what the model is asked: one question, about one picture or none."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from pydantic import ValidationError

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.registry import question_of
from llama_adapter.app.captioning.tasks.task import WithTokenIds
from llama_adapter.app.serving.http_api.errors import ApiError
from llama_adapter.app.serving.http_api.schemas import (
    MAX_QUESTIONS,
    AskingMessage,
    CommonRequest,
    EarlierMessage,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaText,
    OtherItem,
    OtherPart,
    StructuredOutputs,
    TextFormat,
    TextPart,
)
from llama_adapter.app.serving.http_api.structured import Property, read_schema
from llama_adapter.llm import conversation as dialogue
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import TextPrefix

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of a request."""

    url: str
    place: str  # in the request, such as messages[0].content[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One message, independent of the format of the request."""

    role: Role
    parts: tuple[str | Picture, ...] = ()
    has_more: bool = False  # parts that no model sees, such as calls of tools

    @property
    def text(self) -> str:
        """Its texts, one in each line."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Its pictures."""
        return tuple(part for part in self.parts if isinstance(part, Picture))

    def placed(self) -> tuple[str, tuple[int, ...]]:
        """Its texts, in lines unless pictures are between them, and where in them its pictures stand."""
        text, places = "", list[int]()
        for is_text, group in groupby(self.parts, key=lambda part: isinstance(part, str)):
            if is_text:
                text += "\n".join(map(str, group))
            else:
                places += [len(text) for _ in group]
        return text, tuple(places)


class AnswerForm(NamedTuple):
    """The form of an answer: where the request gives it, and an option of `SamplingParams` with its value."""

    place: str
    option: Literal["json_schema", "regex", "choice"]
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatQuestion:
    """What a request asks a model."""

    urls: tuple[str, ...]  # of the pictures that the model sees
    text_prefix: TextPrefix | None  # for a question without a picture
    prompts: tuple[tuple[Question, ...], ...]  # of each prompt, the questions whose answers make up one answer
    sampling: SamplingParams
    stop: tuple[str, ...]
    num_logprobs: int | None  # see `GenerateRequest`
    num_answers: int
    picture_used: str | None = None  # place of the picture, if the request has several and the model sees one
    properties: tuple[Property, ...] = ()  # of the wanted JSON, each a question of the prompt; empty: plain text
    num_ignored_turns: int = 0  # earlier messages that the model does not see in full

    def __post_init__(self) -> None:
        num_questions = max(1, len(self.properties))
        assert all(len(questions) == num_questions for questions in self.prompts), "one question for each property"


_TOOLS_PICTURES: Final = ("input_image", "image_url", "computer_screenshot")  # types of parts
Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | JsonSchemaText
_ANY_OBJECT: Final = {"type": "object"}  # the schema of every JSON object
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_ROLES: Final[Mapping[str, Role]] = {
    **{"system": "system", "developer": "system", "user": "user"},
    **{"assistant": "assistant", "tool": "tool", "function": "tool"},
}


def turn_of(message: AskingMessage | EarlierMessage | OtherItem, *, place: str) -> Turn:
    """The turn of a message at this place of a request."""
    if isinstance(message, OtherItem):
        pictures = _pictures_of_tool(message.output, place=f"{place}.output")
        return Turn(role="assistant" if message.type.endswith("_call") else "tool", parts=(*pictures,), has_more=True)
    content = message.content or ""
    parts = [TextPart(text=content)] if isinstance(content, str) else content
    return Turn(
        role=_ROLES[message.role],
        parts=tuple(
            part.text if isinstance(part, TextPart) else Picture(url=part.url, place=f"{place}.content[{index}]")
            for index, part in enumerate(parts)
            if isinstance(part, TextPart | ImagePart)
        ),
        has_more=any(isinstance(part, OtherPart) for part in parts) or bool(getattr(message, "tool_calls", None)),
    )


def _pictures_of_tool(output: Any, *, place: str) -> Iterator[Picture]:
    """The pictures of a tool's output. Other objects may have an `image_url` too, such as the results of a search."""
    for index, part in enumerate(output if isinstance(output, list) else [output]):
        kind = part.get("type") if isinstance(part, dict) else ""
        names = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else set()
        if kind in _TOOLS_PICTURES or (kind is None and names <= {"image_url", "detail"}):
            with suppress(ValidationError):
                url = ImagePart.model_validate({"image_url": part.get("image_url")}).url
                yield Picture(url=url, place=f"{place}[{index}]" if isinstance(output, list) else place)


def understand_turns(
    turns: Sequence[Turn],
    request: CommonRequest,
    info: ModelInfo,
    *,
    place: str,
    max_new_tokens: int | None,
    form: AnswerForm | None = None,
    num_logprobs: int | None = None,
    num_answers: int = 1,
) -> ChatQuestion:
    """What a request asks the model that `info` describes; raises ApiError if it asks nothing.

    An adapter sees the last picture of the newest message that has one. A model that sees pictures as tokens sees all
    of them, and all earlier turns. Another model whose template has turns sees them if there is no picture. A question
    about a picture that is asked in parts, one for each property of a JSON schema, has no turns but the system's.

    Parameters:
        turns: at least one; the text of the user's last one is the question.
        place: name of the request's field that holds the turns.
        max_new_tokens: limit of an answer's tokens; None for the default.
        form: the form of the answer.
    """
    asked = next((at for at in reversed(range(len(turns))) if turns[at].role == "user"), 0)
    last, after = turns[asked], turns[asked + 1 :]
    earlier = [*turns[:asked], *after]
    is_answered = turns[-1].role == "assistant" or any(turn.role == "assistant" and turn.text.strip() for turn in after)
    if last.role != "user" or is_answered:
        message = "The text of the last message with the role user is the question: send one, and no answer after it."
        raise ApiError(message, param=place)
    with_picture = [turn for turn in turns if turn.pictures and (info.picture_format is None or turn.role != "tool")]
    asks = {"instruction": last.text} if last.text.strip() else {}
    if not with_picture and not asks:
        message = "The request asks nothing: send a text, or a picture as a part of type image_url (input_image)."
        raise ApiError(message, code="missing_image", param=place)
    try:
        question = question_of({**request.task_values(), **asks})
    except ValueError:
        raise ApiError("The extension fields do not belong to one task: see /docs.") from None
    if form is not None and question.task.continuations:
        raise ApiError("A form of the answer and the extension fields exclude each other.")
    if request.chat_template_kwargs:
        question = replace(question, template_values=json.dumps(request.chat_template_kwargs, sort_keys=True))
    if request.output_ids:
        question = replace(question, task=WithTokenIds(question.task))
    has_picture = bool(with_picture)
    properties = () if form is None else _properties(form, info, has_picture=has_picture, num_answers=num_answers)
    if num_answers * len(properties) > MAX_QUESTIONS:
        message = f"`n` times the schema's properties is {num_answers * len(properties)}, the limit is {MAX_QUESTIONS}."
        raise ApiError(message, param="n")
    is_alone = has_picture and (bool(properties) or info.picture_format is None)
    seen = _seen(earlier, info, is_alone=is_alone)
    if info.picture_format is None:
        pictures = [turn.pictures[-1] for turn in with_picture[-1:]]
        question = replace(question, turns=tuple((role, turn.text) for role, turn in seen))
    else:
        pictures = [picture for turn in (*earlier, last) if turn.role != "tool" for picture in turn.pictures]
        if len(pictures) * info.picture_format.tokens_each > info.context:
            message = f"The request has {len(pictures)} pictures, more than the context holds."
            raise ApiError(message, code="context_length_exceeded", param=place)
        question = _with_places(question, seen, last, in_parts=bool(properties))
    parts = tuple(
        item.question_in(question, is_alone=len(properties) == 1, has_picture=has_picture) for item in properties
    )
    is_one_of_several = info.picture_format is None and sum(len(turn.pictures) for turn in turns) > 1
    return ChatQuestion(
        urls=tuple(picture.url for picture in pictures),
        picture_used=pictures[0].place if is_one_of_several else None,
        text_prefix=request.text_prefix,
        prompts=(parts or (question,),),
        properties=properties,
        sampling=sampling_of(request, max_new_tokens=max_new_tokens, form=None if properties else form),
        stop=() if question.task.continuations else stop_of(request),
        num_logprobs=num_logprobs,
        num_answers=num_answers,
        num_ignored_turns=max(0, sum(_is_ignored(turn, with_picture[-1:]) for turn in earlier) - len(seen)),
    )


def _seen(earlier: Sequence[Turn], info: ModelInfo, *, is_alone: bool) -> list[tuple[dialogue.Role, Turn]]:
    """The earlier turns that the model sees, with their roles: if the question stands alone, those of the system."""
    sees_all = info.picture_format is not None
    return [
        (turn.role, turn)
        for turn in (earlier if sees_all or info.has_turns else ())
        if turn.role != "tool"
        and (turn.text.strip() or (sees_all and turn.pictures))
        and (turn.role == "system" or not is_alone)
    ]


def _with_places(
    question: Question, seen: Sequence[tuple[dialogue.Role, Turn]], last: Turn, *, in_parts: bool
) -> Question:
    """The question with the earlier turns that are `seen`, and with its pictures where the turns have them.

    All pictures are in front of a question that is asked in parts, or whose task changes its text.
    """
    said, (text, places) = [(role, *turn.placed()) for role, turn in seen], last.placed()
    question = replace(question, turns=tuple((role, own) for role, own, _ in said))
    if in_parts:
        return question
    if question.instruction == last.text:
        question = replace(question, instruction=text)
    else:
        places = (0,) * len(places)
    return replace(question, pictures=(*(own for _, _, own in said), places))


def stop_of(request: CommonRequest) -> tuple[str, ...]:
    """The texts before which answers end."""
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def form_of(request: CommonRequest, text_format: Format | None = None) -> AnswerForm | None:
    """The form of the answer that a request asks for; raises ApiError if it asks for several.

    `text_format` is its `text.format`, which replaces its `response_format`.
    """
    schema = _schema_of(text_format, "text.format") or _schema_of(request.response_format, "response_format")
    own = request.structured_outputs or StructuredOutputs.model_validate({})
    given = [
        *(() if schema is None else (AnswerForm(schema[0], "json_schema", schema[1]),)),
        AnswerForm("json_schema", "json_schema", request.json_schema),
        AnswerForm("guided_json", "json_schema", request.guided_json),
        AnswerForm("guided_regex", "regex", request.guided_regex),
        AnswerForm("structured_outputs.json", "json_schema", own.json_),
        AnswerForm("structured_outputs.json_object", "json_schema", _ANY_OBJECT if own.json_object else None),
        AnswerForm("structured_outputs.regex", "regex", own.regex),
        AnswerForm("structured_outputs.choice", "choice", own.choice),
        AnswerForm("answer_choices", "choice", own.choice and getattr(request, "answer_choices", None)),
    ]
    forms = [form for form in given if form.value is not None]
    if len(forms) > 1:
        message = f"`{forms[0].place}` and `{forms[1].place}` exclude each other."
        raise ApiError(message, param=forms[1].place)
    return forms[0] if forms and forms[0].option != "choice" else None  # choices are scored


def _schema_of(wanted: Format | None, place: str) -> tuple[str, Any] | None:
    """The JSON schema of the format at `place` in the request, and its own place."""
    if isinstance(wanted, JsonSchemaFormat):
        return f"{place}.json_schema.schema", wanted.json_schema.schema_
    if isinstance(wanted, JsonSchemaText):
        return f"{place}.schema", wanted.schema_
    if isinstance(wanted, JsonObjectFormat):
        return (place, _ANY_OBJECT) if wanted.schema_ is None else (f"{place}.schema", wanted.schema_)
    return None


def _properties(form: AnswerForm, info: ModelInfo, *, has_picture: bool, num_answers: int) -> tuple[Property, ...]:
    """The values that are asked as separate questions; none if the form guides the whole answer instead.

    They are asked if they are not too many for one request. Adapters know questions about a picture. Several other
    questions must differ, and those for texts must have a description, and a picture. Without the package that guides
    answers, all are asked. Raises ApiError for a schema that needs this package.
    """
    schema = form.value
    with suppress(TypeError, ValueError, RecursionError):  # vLLM takes a schema as text too
        schema = json.loads(schema)
    if form.option != "json_schema" or schema is _ANY_OBJECT or not isinstance(schema, dict):
        return ()
    try:
        found = read_schema(schema, place=form.place)
    except ApiError:
        if find_spec("llguidance") is None:
            raise
        return ()
    is_clear = (has_picture and info.picture_format is None) or _are_clear(found, has_picture=has_picture)
    is_asked = len(found) == 1 or (is_clear and num_answers * len(found) <= MAX_QUESTIONS)
    return found if is_asked or find_spec("llguidance") is None else ()


def _are_clear(properties: Sequence[Property], *, has_picture: bool) -> bool:
    """Whether the questions for several values say which value is asked for.

    Choices without a description say it by their values, which no other such question has.
    """
    questions = {(one.description, frozenset(one.values or ())) for one in properties}
    undescribed = [text for one in properties if not one.description for text in one.values or ()]
    return (
        len(questions) == len(properties)
        and len(undescribed) == len(set(undescribed))
        and all(one.values or (has_picture and one.description) for one in properties)
    )


def sampling_of(request: CommonRequest, *, max_new_tokens: int | None, form: AnswerForm | None) -> SamplingParams:
    """How tokens are chosen; None is the default. Raises ApiError for a form that is no JSON schema."""
    given = {name: getattr(request, name) for name in _SAMPLING} | {"max_new_tokens": max_new_tokens}
    for name in ("top_k", "seed"):
        if given[name] == -1:  # all tokens and a new seed, as in llama.cpp and vLLM
            given[name] = None
    if form is not None:
        given[form.option] = form.value
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except ValueError:  # the schema of the request checks everything else
        place = form.place if form is not None else None
        raise ApiError(f"`{place}` is no JSON schema.", param=place) from None


def _is_ignored(turn: Turn, used: Sequence[Turn]) -> bool:
    """Whether the model does not see all of an earlier turn; `used` has the turn of the question's picture, if any."""
    is_used = any(turn is other for other in used)
    return turn.has_more or bool(turn.text.strip()) or (bool(turn.pictures) and not is_used)
