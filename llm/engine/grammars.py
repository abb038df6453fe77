"""Grammars of constrained answers: a JSON schema or a regular expression, followed with the library llguidance.

The library computes which pieces of the vocabulary may come next. It is imported when the first grammar is needed.
"""

import functools
import importlib
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import GrammarError
from llama_adapter.llm.runners.draw import Constraint
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.extras import install_hint

MAX_GRAMMAR_CHARS: Final = 65_536  # of a JSON schema or regular expression
COMPILE_LIMIT_S: Final = 5.0  # the library has no time limit, but its limits of size end every compilation soon after
_MOST_COMPILED = 32  # kept grammars
_LIMITS = {"max_grammar_size": 20_000, "max_lexer_states": 50_000, "verbose_errors": False}
# Every token may be chosen that continues the grammar, not only the usual tokens of a text without alternatives.
_HEAD = '%llguidance {"no_forcing": true}\nstart: '
# JSON as `json.dumps` writes it. With free white space, small models write nothing else.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties", *_DEFINITIONS)  # keywords with a schema for each name
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_NOT_SCHEMAS = ("enum", "const", "default", "examples", "required")
# Keywords beside which an object may have properties that `properties` does not name.
_OPENING = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
)
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_PLACE = re.compile(r"^(at \d+\(\d+\): |error: )")
_LOOKS = re.compile(r"(look-around, .*|backreferences are) not supported$|.*: lookarounds not supported yet; [A-Z]")
_KEYWORD = re.compile(r'"(\$?[A-Za-z]{1,40})"')


class Grammar:
    """A compiled grammar. Any number of answers may follow it at once."""

    def __init__(self, matcher: Any, table: "_Table") -> None:
        self._matcher, self._table = matcher, table

    def start(self, end_ids: Sequence[int]) -> Constraint:
        """The constraint of one answer. The tokens `end_ids` may end the answer where the grammar may end."""
        return _Followed(self._matcher.deep_copy(), self._table, end_ids)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiled = functools.lru_cache(_MOST_COMPILED)(self._compile)

    def of(self, sampling: SamplingParams) -> Grammar | None:
        """The grammar that these answers follow; None if they are free.

        Raises UsageError without the library, and GrammarError for a schema or an expression that cannot be followed.
        """
        if not sampling.is_constrained:
            return None
        with self._lock:
            table = self._table
        return Grammar(self._compiled(table, sampling.json_schema, sampling.regex), table)

    @functools.cached_property
    def _table(self) -> "_Table":
        return _Table(self._tokenizer)

    def _compile(self, table: "_Table", json_schema: str | None, regex: str | None) -> Any:
        what = "The JSON schema" if regex is None else "The regular expression"
        if (num_chars := len(json_schema or regex or "")) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"{what} has {num_chars:,} characters, the limit is {MAX_GRAMMAR_CHARS:,}")
        library = table.library
        rule = f"%json {_json_rule(json_schema)}" if json_schema else f"/{library.regex_to_lark(regex, use_ascii='d')}/"
        grammar = library.LLMatcher.grammar_from_lark(_HEAD + rule)
        limits = library.LLParserLimits(**_LIMITS)
        making = self._compiling.submit(library.LLMatcher, table.pieces, grammar, log_level=0, limits=limits)
        try:
            matcher = making.result(COMPILE_LIMIT_S)
        except TimeoutError:
            making.cancel()
            raise GrammarError(f"{what} took more than {COMPILE_LIMIT_S:g} s to prepare", hint="simplify it") from None
        if matcher.is_error():
            raise _refusal(what, matcher.get_error())
        return matcher


def _json_rule(json_schema: str) -> str:
    """The library's form of a JSON schema. Raises GrammarError for one that is nested too deeply."""
    try:
        schema = json.loads(json_schema)
        closed = _closed(schema, opens_definitions=_has_part_elsewhere(schema))
        return json.dumps({**closed, "x-guidance": _JSON_FORM})
    except RecursionError:
        raise GrammarError("The JSON schema is nested too deeply", hint="simplify it") from None


def _closed(schema: Any, *, opens_definitions: bool, is_open: bool = False) -> Any:
    """The schema, with objects that have no other properties than those it names, unless it says that they may.

    Else a model may add properties without end. Parts of `allOf` stay open (`is_open`), because each names some of the
    properties; if parts refer to definitions, so do these (`opens_definitions`).
    """
    if isinstance(schema, list):
        return [_closed(one, opens_definitions=opens_definitions, is_open=is_open) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, value in schema.items():
        stays_open = is_open or key == "allOf" or (opens_definitions and key in _DEFINITIONS)
        inner = functools.partial(_closed, opens_definitions=opens_definitions, is_open=stays_open)
        if key in _BY_NAME and isinstance(value, dict):
            closed[key] = {name: inner(one) for name, one in value.items()}
        elif key != "format" or value in _FORMATS:  # others have no effect, as JSON Schema defines it
            closed[key] = value if key in _NOT_SCHEMAS else inner(value)
    names, required = schema.get("properties"), schema.get("required", [])
    if is_open or not isinstance(names, dict) or not isinstance(required, list) or not _OPENING.isdisjoint(schema):
        return closed
    is_complete = all(isinstance(name, str) and name in names for name in required)
    return {**closed, "additionalProperties": False} if is_complete else closed


def _has_part_elsewhere(schema: Any, *, is_part: bool = False) -> bool:
    """Whether one of several parts that describe the same object is a reference.

    An `allOf` with one reference alone has no other part: some libraries write a type with a description so.
    """
    if isinstance(schema, list):
        return any(_has_part_elsewhere(one, is_part=is_part) for one in schema)
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf")
    num_parts = (len(parts) if isinstance(parts, list) else 0) + ("properties" in schema) + ("$ref" in schema)
    if "$ref" in schema and (is_part or num_parts > 1):
        return True
    return any(
        _has_part_elsewhere(value, is_part=is_part or (key == "allOf" and num_parts > 1))
        for key, value in schema.items()
    )


class _Table:
    """The bytes of the vocabulary, in the form of the library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            self.library: Any = importlib.import_module("llguidance")
        except ImportError:
            raise UsageError(
                "Answers in JSON and by regular expressions need the package llguidance",
                hint=install_hint("structured"),
            ) from None
        ids = range(tokenizer.vocab_size)
        inside, first = ([tokenizer.bytes_of(id, is_first=is_first) for id in ids] for is_first in (False, True))
        # A piece may have other bytes at the start of a text, where SentencePiece drops a space. Then the first token
        # of an answer has a number of its own, beyond the vocabulary.
        self.size, self.first = len(inside), len(inside) if first != inside else 0
        vocabulary = _Vocabulary(inside + (first if self.first else []), eos_id=tokenizer.eos_id)
        self.pieces: Any = self.library.LLTokenizer(self.library.TokenizerWrapper(vocabulary))


class _Vocabulary:
    """What the library's `TokenizerWrapper` reads."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], *, eos_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_id

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text, which only forced tokens would need."""
        return []


class _Followed:
    """See `Constraint`. Calls for one answer have the tokens of earlier calls and the newer ones."""

    def __init__(self, matcher: Any, table: _Table, end_ids: Sequence[int]) -> None:
        self._matcher, self._table, self._end_ids = matcher, table, list(end_ids)
        self._num_taken = 0
        self.has_failed = False

    def allowed(self, answer: Sequence[int], size: int) -> np.ndarray:
        if answer and (answer[-1] < 0 or answer[-1] in self._end_ids):
            return np.ones(size, bool)  # a step that was started before the answer's end was read
        for token_id in answer[self._num_taken :]:
            self._matcher.consume_token(token_id if self._num_taken else self._table.first + token_id)
            self._num_taken += 1
        start = 0 if self._num_taken else self._table.first
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed_V = np.zeros(size, bool)
        allowed_V[: self._table.size] = bits[start : start + self._table.size]
        allowed_V[self._end_ids] = self._matcher.is_accepting()
        if self._matcher.is_error() or not allowed_V.any():
            self.has_failed = True
            allowed_V[:] = True
        return allowed_V


def _refusal(what: str, reason: str) -> GrammarError:
    """The error for a reason of the library. Its message has no text of the grammar, except names of keywords."""
    unknown = _UNKNOWN_KEYS.search(reason)
    if unknown is not None and (names := _KEYWORD.findall(unknown[1])):
        return GrammarError(f"{what} uses {', '.join(f'`{name}`' for name in names)}, which is not supported")
    lines = reason.splitlines() or [""]
    shown = _PLACE.sub("", next((line for line in lines if line.startswith("error: ")), lines[0]))
    looks = r"has look-around, \b, ^ or $ inside, or a back-reference, which is not supported"
    problem = looks if _LOOKS.match(shown) else "is invalid, or too complex to follow"
    return GrammarError(f"{what} {problem}", hint=shown[:300])
