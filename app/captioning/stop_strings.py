"""Stop strings: a stream of text ends before the first of them."""

from collections.abc import Sequence


class StopStrings:
    """Passes a stream of text on, up to the first stop string; holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(filter(None, stops))
        self._held = ""
        self.is_hit = False

    def push(self, text: str) -> str:
        """Takes the next piece of the stream; returns the text that certainly comes before any stop string."""
        if not self._stops or self.is_hit:
            return "" if self.is_hit else text
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_hit, self._held = True, ""
            return text[: min(places)]
        num_held = max(_num_begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The text held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
