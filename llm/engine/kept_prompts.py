"""Which beginnings of prompts a runner keeps, so that further questions about a picture compute their own tokens."""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import replace

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.engine.requests import Request
from llama_adapter.llm.runners.base import KeptTokens

_numbers = itertools.count()  # unique among all engines, because they may use one runner in turn


class KeptPrompts:
    """The most recently used beginnings that fit `config.kept_places`. It knows no tensors.

    A beginning ends with the prompt's last picture. It is known by its token ids and by the places and digests of its
    pictures, because placeholder ids are the same for all pictures. Decoders with an adapter keep none: what they
    compute depends on the adapter's prefix too.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._most = 0 if config.decoder.num_adapter_layers else config.kept_places
        self._past_length = config.past_length
        self._kept: OrderedDict[Hashable, KeptTokens] = OrderedDict()  # the least recently used first
        self._dropped: list[int] = []

    def num_known(self, request: Request) -> int:
        """How many tokens of a prompt need not be computed."""
        found = self._kept.get(self.key(request))
        return 0 if found is None else found.num_tokens

    def key(self, request: Request) -> Hashable:
        """What tells the beginning of a prompt from others; None if it has none that can be kept."""
        stop = request.pictures[-1].stop if request.pictures else 0
        if not 0 < stop < len(request.prompt_ids) or self._places(stop) > self._most:
            return None
        return request.prompt_ids[:stop], tuple((picture.start, picture.digest) for picture in request.pictures)

    def use(self, request: Request) -> KeptTokens | None:
        """The beginning of a prompt whose prefill is planned now; from now on it is known. Others may be dropped."""
        key = self.key(request)
        if key is None:
            return None
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return replace(found, is_known=True)
        new = self._kept[key] = KeptTokens(next(_numbers), request.pictures[-1].stop, is_known=False)
        while sum(self._places(kept.num_tokens) for kept in self._kept.values()) > self._most:
            self._dropped.append(self._kept.popitem(last=False)[1].number)
        return new

    def take_dropped(self) -> list[int]:
        """Numbers of the beginnings that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def forget(self, kept: Iterable[KeptTokens | None], dropped: Iterable[int]) -> None:
        """Forget the beginnings that a failed plan was to keep, of its `kept`, because the runner may not have them.

        It may also have them, and still have those that the plan was to drop, so the next plan drops all of these.
        """
        new = {tokens.number for tokens in kept if tokens is not None and not tokens.is_known}
        self._kept = OrderedDict((key, tokens) for key, tokens in self._kept.items() if tokens.number not in new)
        self._dropped += [*dropped, *new]

    def clear(self) -> None:
        """Forget all, when the runner does."""
        self._kept.clear()
        self._dropped.clear()

    def _places(self, num_tokens: int) -> int:
        return self._past_length + num_tokens
