"""Sessions that survive a reload of the page, by a key of the browser's tab. Imports no Gradio."""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

Session = TypeVar("Session")

# Puts a random key of the browser's tab, which a reload and going back keep, before the session.
TAB_KEY: Final = """(_, session) => {
    try {
        return [sessionStorage.llamaAdapterTab ??= crypto.getRandomValues(new Uint32Array(4)).join('-'), session];
    } catch {
        return [null, session]; // the browser stores nothing
    }
}"""


class Kept(Generic[Session]):
    """The newest sessions, at most `most`, by their keys. A key is a secret of one browser."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def replace(self, key: object, session: Session) -> Session | None:
        """Keep this session of a page that was opened; returns the one that its tab of the browser had before.

        A key that is no text, or is too short or too long, keeps nothing.
        """
        if not isinstance(key, str) or not 16 <= len(key) <= 100:
            return None
        before = self._sessions.pop(key, None)
        self._sessions[key] = session
        while len(self._sessions) > self._most:
            self._sessions.popitem(last=False)
        return before
