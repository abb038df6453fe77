"""How a row's next token is chosen, as plain values. Imports no torch."""

# V vocabulary

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

NO_TOKEN: Final = -1  # the token of a row whose logits are not finite


class Constraint(Protocol):
    """The form that one row's answer must have, such as a JSON schema."""

    has_failed: bool  # whether the answer cannot be continued, because following it has become too complex

    def allowed(self, answer: Sequence[int], size: int) -> np.ndarray:
        """Whether each token may follow these tokens of the answer: bool (V,), with V = `size`."""


class Rules(NamedTuple):
    """Changes of a row's logits before its token is drawn. They depend on the tokens of prompt and answer."""

    repetition: float = 1.0  # repetition penalty, for tokens of prompt and answer
    presence: float = 0.0  # subtracted once for each token of the answer
    frequency: float = 0.0  # subtracted each time that a token occurs in the answer
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()  # without the newest token, if `has_unread`
    has_unread: bool = False  # the row's newest token belongs to the answer, and is still on the device only
    constraint: Constraint | None = None

    @property
    def needs_newest(self) -> bool:
        """Whether the host must know the newest token."""
        return self.constraint is not None and self.has_unread

    @property
    def penalises(self) -> bool:
        """Whether a penalty applies."""
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


class Draw(NamedTuple):
    """How one row's next token is drawn: the settings, and a uniform random number in [0, 1)."""

    temperature: float
    top_p: float
    top_k: int  # 0 keeps every token
    uniform: float
    min_p: float = 0.0
    rules: Rules | None = None

    @property
    def is_plain(self) -> bool:
        """Whether temperature, top-p and top-k are all that a draw needs, so that exported graphs can make it."""
        return self.rules is None and self.min_p == 0.0
