"""The log of a server on stderr, as text or as lines of JSON."""

import datetime
import json
import logging
from collections.abc import Callable
from typing import Any, Final, Literal

from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_text

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")
FIELDS: Final = "fields"  # the attribute of a log record with values for JSON
_NAME: Final = "llama_adapter"


class Log:
    """The log of this process. Other libraries' warnings are in it too."""

    def __init__(self, *, level: LogLevel, log_format: LogFormat, quiet: bool) -> None:
        """With `quiet`, notes are left out, and only warnings are logged."""
        self._is_json, self._tells = log_format == "json", level in ("debug", "info") and not quiet
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(_Json() if self._is_json else _Text("%(asctime)s %(message)s"))
        log = logging.getLogger(_NAME)
        log.handlers[:] = [self._handler]
        log.propagate = False
        log.setLevel(logging.WARNING if quiet else level.upper())
        if self._is_json:
            logging.getLogger().handlers[:] = [self._handler]

    @property
    def tell(self) -> Callable[[str], None]:
        """A function for notes, which are of the level info."""
        return self.announce if self._tells else _nothing

    def announce(self, text: str) -> None:
        """A message at any level, also with `quiet`."""
        if not self._is_json:
            return say(text)
        self._handler.handle(logging.LogRecord(_NAME, logging.INFO, "", 0, text, None, None))


def _nothing(text: str) -> None:
    pass


class _Text(logging.Formatter):
    """Escapes control characters: errors may contain text of pictures, models and clients."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return shown_text(super().formatMessage(record))


class _Json(logging.Formatter):
    """One object in each line: time (UTC), level, logger, message, and the record's `FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        values: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)
