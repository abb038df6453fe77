"""How a row's next token is chosen, as plain values. Imports no torch."""

from collections.abc import Sequence
from typing import Final, NamedTuple

NO_TOKEN: Final = -1  # the token of a row whose logits are not finite


class Draw(NamedTuple):
    """How one row's next token is drawn: the settings, and a uniform random number in [0, 1)."""

    temperature: float
    top_p: float
    top_k: int  # 0 keeps every token
    uniform: float
    penalty: float = 1.0  # of the tokens in `seen`, and of the row's newest token
    seen: Sequence[int] = ()  # token ids of the prompt, and of the answer as far as the host knows it
