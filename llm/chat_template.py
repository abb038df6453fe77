"""Renders the chat templates of models, which are programs in Jinja, in a process that can be ended.

A template comes with a model's files. It gets plain data only, in Jinja's sandbox, and its time, memory and output are
limited. The environment is that of transformers (`utils/chat_template_utils.py`).
"""

import functools
import json
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from llama_adapter.llm.errors import PromptError
from llama_adapter.runtime.child_process import ChildProcess, limit_memory
from llama_adapter.runtime.text import shown_excerpt

TIME_LIMIT_S: Final = 5.0
MAX_RENDERED_CHARACTERS: Final = 4_000_000  # more than the largest contexts hold
_START_LIMIT_S: Final = 60.0
_MEMORY_BYTES: Final = 1 << 30  # in addition to the process itself
_LENGTH_BYTES: Final = 8
_HINT: Final = "name another format of prompts as --prompt-template, for example instruction"

Message = Mapping[str, Any]  # role, and content: a text or a list of parts


class ChatRefusedError(PromptError):
    """A template refuses a chat or fails with it, each time. Limits raise PromptError itself."""


class TemplateProcess:
    """A process that renders one template. It starts with the first chat, and again after it was ended. Thread-safe."""

    def __init__(self, template: str, names: Mapping[str, str]) -> None:
        """`names` are further variables of the template, such as bos_token."""
        self._template, self._names = template, dict(names)
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None

    def render(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        asks: bool = True,
        now: datetime | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The texts of chats. With `asks`, each ends with the beginning of the assistant's turn.

        `now` is the time that templates see; default: the present. `values` are further variables. Raises
        ChatRefusedError if the template fails or refuses a chat, and PromptError if it exceeds a limit.
        """
        now = now or datetime.now()
        names = {**(values or {}), **self._names}
        request = {"template": self._template, "names": names, "chats": chats, "asks": asks, "now": str(now)}
        with self._lock:
            try:
                reply = self._exchange(json.dumps(request).encode())
            except TimeoutError:
                self._end()
                raise _failure(f"did not end within {TIME_LIMIT_S:g} s") from None
            except (OSError, ValueError) as error:
                how = "" if self._child is None or not self._child.has_ended(within_s=1) else self._child.how_it_ended()
                self._end()
                raise _failure(f"was ended {how}".rstrip() if how else f"was ended: {error}") from None
        if "refusal" in reply:
            raise _failure(str(reply["refusal"]), ChatRefusedError)
        if "error" in reply:
            raise _failure(str(reply["error"]))
        texts: list[str] = reply["texts"]
        return texts

    def _exchange(self, request: bytes) -> dict[str, Any]:
        child = self._child
        if child is None or child.has_ended():
            self._end()
            child = self._child = ChildProcess(f"{__name__}:run", environ={}, watch_parent=True)
            weakref.finalize(self, _end, child)
            _received(child.connection, 1, deadline=time.monotonic() + _START_LIMIT_S)
        deadline = time.monotonic() + TIME_LIMIT_S
        child.connection.settimeout(TIME_LIMIT_S)
        child.connection.sendall(len(request).to_bytes(_LENGTH_BYTES) + request)
        length = int.from_bytes(_received(child.connection, _LENGTH_BYTES, deadline=deadline))
        reply: dict[str, Any] = json.loads(_received(child.connection, length, deadline=deadline))
        return reply

    def _end(self) -> None:
        if self._child is not None:
            _end(self._child)
            self._child = None


def _end(child: ChildProcess) -> None:
    child.process.kill()
    child.process.wait()
    child.release()


def _failure(reason: str, kind: type[PromptError] = PromptError) -> PromptError:
    return kind(f"The model's chat template {reason}", hint=_HINT)


def _received(connection: socket.socket, number: int, *, deadline: float | None = None) -> bytes:
    """Receive exactly `number` bytes. Raises TimeoutError, and ConnectionError at the end of the stream."""
    content = bytearray()
    while len(content) < number:
        connection.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
        part = connection.recv(min(number - len(content), 1 << 20))
        if not part:
            raise ConnectionAbortedError("its process has closed the connection")
        content += part
    return bytes(content)


# In the process


def run(descriptor: str) -> None:
    """Render templates until the parent process ends."""
    import jinja2.sandbox  # noqa: F401  (imported before the first template's time begins)

    limit_memory(_MEMORY_BYTES)
    connection = socket.socket(fileno=int(descriptor))
    with suppress(ConnectionError):
        connection.sendall(b"1")
        while True:
            request = json.loads(_received(connection, int.from_bytes(_received(connection, _LENGTH_BYTES))))
            reply = json.dumps(_answer(request)).encode()
            connection.sendall(len(reply).to_bytes(_LENGTH_BYTES) + reply)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    import jinja2

    try:
        template = _compiled(request["template"])
        template.environment.globals["strftime_now"] = datetime.fromisoformat(request["now"]).strftime
        variables = {"tools": None, "documents": None, "add_generation_prompt": request["asks"], **request["names"]}
        return {"texts": [_rendered(template, messages=chat, **variables) for chat in request["chats"]]}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is no Jinja template: {shown_excerpt(str(error))}"}
    except MemoryError:
        return {"error": "needs too much memory"}
    except _TooLong:
        return {"error": f"writes more than {MAX_RENDERED_CHARACTERS:,} characters"}
    except jinja2.TemplateError as error:  # what `raise_exception` says, among others
        return {"refusal": f"refuses this chat: {shown_excerpt(str(error), length=300)}"}
    except Exception as error:
        return {"refusal": f"failed: {type(error).__name__}: {shown_excerpt(str(error), length=300)}"}


class _TooLong(Exception):
    pass


def _rendered(template: Any, **variables: Any) -> str:
    parts, length = [], 0
    for part in template.generate(**variables):
        length += len(part)
        if length > MAX_RENDERED_CHARACTERS:
            raise _TooLong
        parts.append(part)
    return "".join(parts)


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> Any:
    """The compiled template, in the environment that templates of models expect."""
    import jinja2
    from jinja2 import ext, nodes, parser, sandbox

    class Generation(ext.Extension):
        """`{% generation %}`, which marks an assistant's text for training and has no effect here."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: parser.Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

        def body(self, caller: Any) -> str:
            return str(caller())

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)
