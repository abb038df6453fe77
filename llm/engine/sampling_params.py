"""Settings of token sampling, as plain values. Imports no torch: the command line reads the defaults."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


# Without slots, so that defaults can be read from the class: SamplingParams.top_p.
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The default is greedy decoding, in which top_p and top_k have no effect. `stop` may be one text or any sequence of
    texts, `stop_token_ids` one id or any sequence of ids. Raises ValueError for values out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0  # below 1e-6 means greedy, because dividing by it would exceed float32's range
    top_p: float = 0.75  # 0..1, the reference's default
    top_k: int = 0  # 0 keeps every token
    seed: int | None = None  # equal seeds give equal answers in any batch; None draws a new seed
    repetition_penalty: float = 1.0  # of tokens of prompt and answer: divides positive logits, multiplies negative ones
    stop: Sequence[str] = ()  # texts that end the answer; the answer does not contain them
    stop_token_ids: Sequence[int] = ()  # end the answer, as the model's end token does; they are not part of it
    max_length: int | None = None  # most tokens of prompt and answer together; None: only the context limits them
    max_prompt_tokens: int | None = None  # a longer prompt loses its beginning; None: refused if beyond the context

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be texts that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", stop)
        ids = (self.stop_token_ids,) if isinstance(self.stop_token_ids, int) else tuple(self.stop_token_ids)
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ValueError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", ids)
        for name in ("max_new_tokens", "top_k", "seed", "max_length", "max_prompt_tokens"):
            value = getattr(self, name)
            if (not isinstance(value, int) or isinstance(value, bool)) and not (
                value is None and name in ("seed", "max_length", "max_prompt_tokens")
            ):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        for name in ("max_length", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):  # written so that NaN is refused too
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0.0 <= self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in 0..1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps every token), got {self.top_k}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty must lie in 0.01..100, got {self.repetition_penalty}")

    @property
    def greedy(self) -> bool:
        """Whether the token with the highest logit is chosen, without a random number."""
        return self.temperature < 1e-6

    def settings(self) -> dict[str, Any]:
        """JSON values by name for records and manifests.

        Settings that were added later are absent if they are default.
        """
        values = asdict(self) | {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        later: dict[str, Any] = {"repetition_penalty": 1.0, "stop": [], "stop_token_ids": []}
        later |= {"max_length": None, "max_prompt_tokens": None}
        return {name: value for name, value in values.items() if name not in later or value != later[name]}
