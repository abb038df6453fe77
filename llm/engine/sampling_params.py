"""Settings of token sampling, as plain values. Imports no torch: the command line reads the defaults."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from llama_adapter.runtime.given import real_number, texts, whole_number

# The least value of each whole number, None: any. None as the value is allowed if it is the default.
_LEAST: Final = {"max_new_tokens": 0, "top_k": 0, "seed": None, "max_length": 1, "max_prompt_tokens": 1}

_FIRST: Final = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")  # settings that all records have

_RANGES: Final = {
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


# Without slots, so that defaults can be read from the class: SamplingParams.top_p.
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The default is greedy decoding, in which top_p, top_k and min_p have no effect. `stop` may be one text or any
    sequence of texts, `stop_token_ids` one id or any sequence of ids. Raises ValueError for values out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0  # below 1e-6 means greedy, because dividing by it would exceed float32's range
    top_p: float = 0.75  # 0..1, the reference's default
    top_k: int = 0  # 0 keeps every token
    seed: int | None = None  # equal seeds give equal answers in any batch; None draws a new seed
    min_p: float = 0.0  # 0..1: drops tokens less likely than this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # of tokens of prompt and answer: divides positive logits, multiplies negative ones
    presence_penalty: float = 0.0  # -2..2, as OpenAI defines it: subtracted from the logits of tokens of the answer
    frequency_penalty: float = 0.0  # -2..2, the same for each time that a token occurs in the answer
    stop: Sequence[str] = ()  # texts that end the answer; the answer does not contain them
    stop_token_ids: Sequence[int] = ()  # end the answer, as the model's end token does; they are not part of it
    max_length: int | None = None  # most tokens of prompt and answer together; None: only the context limits them
    json_schema: str | Mapping[str, Any] | None = None  # the answer is JSON of this schema, kept as JSON text
    regex: str | None = None  # the whole answer matches this regular expression
    max_prompt_tokens: int | None = None  # a longer prompt loses its beginning; None: refused if beyond the context

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", texts("stop", self.stop))
        ids = self.stop_token_ids if isinstance(self.stop_token_ids, Iterable) else (self.stop_token_ids,)
        ids = tuple(whole_number("stop_token_ids", token_id, least=0) for token_id in ids)
        object.__setattr__(self, "stop_token_ids", ids)
        for name, least in _LEAST.items():
            if getattr(self, name) is not None or getattr(SamplingParams, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))
        object.__setattr__(self, "json_schema", _json_schema(self.json_schema))
        if self.regex is not None and not isinstance(self.regex, str):
            raise ValueError(f"regex must be a text, got {self.regex!r}")
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("json_schema and regex exclude each other")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        if not 0.0 <= self.temperature < float("inf"):  # written so that NaN is refused too
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must lie in {low:g}..{high:g}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether the token with the highest logit is chosen, without a random number."""
        return self.temperature < 1e-6

    @property
    def is_constrained(self) -> bool:
        """Whether the answer must have a form."""
        return self.json_schema is not None or self.regex is not None

    def numbered(self, number: int) -> "SamplingParams":
        """The settings of one of several answers to a prompt, counted from 0: each has a seed of its own."""
        return self if self.seed is None or not number else replace(self, seed=self.seed + number)

    def settings(self) -> dict[str, Any]:
        """JSON values by name for records and manifests.

        Settings that were added later are absent if they are default.
        """
        values = asdict(self) | {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        changed = {one.name for one in fields(self) if getattr(self, one.name) != one.default}
        return {name: value for name, value in values.items() if name in changed or name in _FIRST}


def _json_schema(given: str | Mapping[str, Any] | None) -> str | None:
    """A JSON schema as JSON text. Raises ValueError if it is no JSON object."""
    if given is None:
        return None
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        if isinstance(schema, Mapping):
            return json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        pass
    raise ValueError("json_schema must be a JSON schema: an object, or its JSON text")
