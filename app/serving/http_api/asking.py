"""Submits the question of a request to a service, and makes the body of the answers. Uses no sockets."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.captioning.tasks.answers import Answer, Event
from llama_adapter.app.captioning.tasks.prompts import prompt_length
from llama_adapter.app.serving.http_api.conversation import ChatQuestion
from llama_adapter.app.serving.http_api.errors import ApiError, PictureRefusedError, of_answer, of_refusal
from llama_adapter.app.serving.http_api.pictures import PictureSettings, read_picture
from llama_adapter.app.serving.http_api.schemas import CommonRequest
from llama_adapter.app.serving.http_api.structured import Property, combined
from llama_adapter.app.serving.online.base import OnlineService
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import ServiceError
from llama_adapter.runtime.errors import LlamaAdapterError

ALIAS = "default"  # a name of the loaded model, whatever its other names are
_INLINE_CHARS = 1000  # a prompt up to this length is tokenised in the event loop: starting a thread takes as long

NumberedEvent = tuple[int, Event]  # the number is the index of the event's answer
Request = TypeVar("Request", bound=CommonRequest)


class Reply(ABC, Generic[Request]):
    """The answers to a request in the format of one endpoint. The class says how its requests are read, too."""

    path: ClassVar[str]
    base_request: type[Request]  # The parameters that code reads. `Form.request` has all of them, and validates.
    id_prefix: ClassVar[str]
    places: ClassVar[tuple[str, str]]  # the fields with the picture and with the prompt, for errors
    num_prompts: int = 1

    @abstractmethod
    def __init__(self, request: Request, asked: ChatQuestion, head: Mapping[str, Any], info: ModelInfo) -> None:
        """The body and every chunk have the fields of `head`."""

    @staticmethod
    @abstractmethod
    def understand(request: Request, info: ModelInfo) -> ChatQuestion:
        """What a request asks; raises ApiError if it asks nothing, or if its parameters contradict each other."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of complete answers."""

    @abstractmethod
    def frames(self, events: AsyncIterator[NumberedEvent]) -> AsyncIterator[bytes]:
        """The server-sent events of answers, sent as they arrive; an answer with an error ends the stream."""


class Form(NamedTuple, Generic[Request]):
    """An endpoint: the schema of its requests, with all parameters, and the class of its replies."""

    request: type[Request]
    reply: type[Reply[Request]]


class PartedAnswer:
    """A JSON answer that is combined from several requests, one for each property."""

    def __init__(self, handles: Sequence[RequestHandle], properties: Sequence[Property]) -> None:
        self._handles, self._properties = handles, properties

    def cancel(self) -> None:
        """Cancel all requests."""
        for handle in self._handles:
            handle.cancel()

    async def answer(self) -> Answer:
        """The combined answer. If a request fails, this is its answer, and the other requests are cancelled."""
        answers: list[Answer] = []
        for handle in self._handles:
            answers.append(await handle.answer())
            if answers[-1].error is not None:
                self.cancel()
                return answers[-1]
        return combined(self._properties, answers)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """The only event is the combined answer: it has no pieces of text."""
        yield await self.answer()


Answering = RequestHandle | PartedAnswer  # one answer in progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A request that the service has accepted."""

    answering: Sequence[Answering]  # `n` for each prompt
    reply: Reply[Any]
    model: str = ""  # its name in the reply
    num_ignored_turns: int = 0

    def cancel(self) -> None:
        """Cancel all answers. Has no effect on answered requests."""
        for one in self.answering:
            one.cancel()

    async def body(self, note: Callable[[int, Answer], None] = lambda number, answer: None) -> dict[str, Any]:
        """The body of the complete answers; `note` gets each. If one fails, cancels the others and raises ApiError."""
        answers: list[Answer] = []
        try:
            for number, one in enumerate(self.answering):
                answers.append(await one.answer())
                note(number, answers[-1])
                if (error := answers[-1].error) is not None:
                    raise of_answer(error, place=self.reply.places[0])
        finally:
            self.cancel()
        return self.reply.whole(answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Submits requests of all formats to one service."""

    service: OnlineService
    pictures: PictureSettings
    model_names: Sequence[str] = ()  # the model's names from the server's settings, if any

    async def ask(
        self, request: Request, *, form: Form[Request], request_id: str, client: str, is_background: bool = False
    ) -> Pending:
        """Submit a request; `request_id` is `req_` and a number. Raises ApiError."""
        info = model_info(self.service)
        name = shown_name(request.model or ALIAS, info=info, names=self.model_names)
        asked = form.reply.understand(request, info)
        options = {
            "client": client,
            "is_background": is_background,
            "with_pieces": bool(request.stream) and not asked.properties,
        }
        try:
            answering = await self._submit_all(asked, options, default_prompt=info.default_prompt)
        except ApiError as error:
            if error.param == "messages":
                error.param = form.reply.places[not isinstance(error, PictureRefusedError)]
            raise
        used = {} if asked.picture_used is None else {"picture_used": asked.picture_used}
        head = {"id": f"{form.reply.id_prefix}{request_id.removeprefix('req_')}", "model": name, **used}
        reply = form.reply(request, asked, head, info)
        return Pending(answering=answering, reply=reply, model=name, num_ignored_turns=asked.num_ignored_turns)

    async def _submit_all(
        self, asked: ChatQuestion, options: Mapping[str, Any], *, default_prompt: str
    ) -> list[Answering]:
        pictures = [await read_picture(url, settings=self.pictures) for url in asked.urls]
        handles: list[Answering] = []
        submitted: list[RequestHandle] = []
        try:
            for questions, number in itertools.product(asked.prompts, range(asked.num_answers)):
                parts = []
                for question in questions:
                    ask = Ask(
                        picture=pictures[0] if pictures else None,
                        others=tuple(pictures[1:]),
                        text_prefix=asked.text_prefix,
                        prompt=question.prompt(default_prompt),
                        sampling=asked.sampling.numbered(number),
                        task=question.task,
                        stop=() if question.task.continuations else asked.stop,
                        num_logprobs=asked.num_logprobs,
                        **options,
                    )
                    parts.append(await _submit(ask, service=self.service))
                    submitted.append(parts[-1])
                handles.append(PartedAnswer(parts, asked.properties) if asked.properties else parts[0])
        except BaseException:
            for handle in submitted:
                handle.cancel()
            raise
        return handles


def model_info(service: OnlineService) -> ModelInfo:
    """The loaded model; raises ApiError while no model is loaded."""
    try:
        return service.info
    except ServiceError as error:
        raise of_refusal(error) from None


def shown_name(name: str, *, info: ModelInfo, names: Sequence[str]) -> str:
    """The model name that an answer shows; `names` are the model's names from the server's settings, if any.

    Raises ApiError if `name` is not a name of the loaded model.
    """
    names = names or (info.name,)
    if name not in (*names, ALIAS):
        message = f"Model not found. The loaded model is `{names[0]}`: send this name or `{ALIAS}`."
        raise ApiError(message, status=404, code="model_not_found", param="model")
    return names[0] if name == ALIAS else name


async def _submit(ask: Ask, *, service: OnlineService) -> RequestHandle:
    num_chars = prompt_length(ask.prompt) + sum(map(len, ask.task.continuations))
    try:
        if num_chars <= _INLINE_CHARS and not ask.sampling.is_constrained:  # forms may take seconds to prepare
            return service.submit(ask)
        return await asyncio.to_thread(service.submit, ask)
    except (LlamaAdapterError, ValueError) as error:
        raise of_refusal(error) from None
