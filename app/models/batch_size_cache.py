"""Rows that a device's memory turned out to allow, remembered between runs: a small file, for batch size `auto` alone.

`batch-ceilings.json` lies in the user's cache folder, `$XDG_CACHE_HOME/llama-adapter`. A ceiling holds for one model on
one device in one type, mode and context, and is forgotten after 30 days: another program may have had the memory. Batch
sizes given as numbers neither read it nor write it, and deleting it is harmless.
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any, Final

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.kernels.library import cache_folder

FILE_NAME: Final = "batch-ceilings.json"
MAX_AGE: Final = datetime.timedelta(days=30)
_FORMAT: Final = "llama-adapter batch ceilings 1"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a ceiling holds for; where any of it is otherwise, it says nothing."""

    model: str  # digest of the weights
    device: str
    dtype: str
    precision: str
    context: int
    mode: str  # graphs take memory of their own
    device_bytes: int | None  # all memory of the device

    def ceiling(self, *, today: datetime.date | None = None) -> tuple[int | None, str]:
        """The rows that are remembered, or None, and a note for people where the file cannot be read."""
        try:
            entries = _read()
        except (OSError, ValueError) as error:
            return None, f"what is remembered of batch sizes cannot be read, and does not count: {error}"
        own = [entry for entry in entries if entry.setting == self and entry.is_fresh(today or _today())]
        return (own[-1].rows if own else None), ""

    def remember(self, rows: int, *, today: datetime.date | None = None) -> str:
        """Keep a ceiling in the place of an earlier one; returns a note for people where that is not to be had.

        A file that cannot be understood is replaced. Of two processes that remember at once, one is forgotten.
        """
        today = today or _today()
        try:
            entries = _read()
        except (OSError, ValueError):
            entries = []
        kept = [entry for entry in entries if entry.setting != self and entry.is_fresh(today)]
        entries = [*kept, _Entry(setting=self, rows=rows, date=today)]
        content = {"format": _FORMAT, "ceilings": [entry.to_dict() for entry in entries]}
        try:
            with atomic_write(_path()) as file:
                file.write(json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            return f"the batch size cannot be remembered for other runs: {error}"
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    setting: Setting
    rows: int
    date: datetime.date

    def is_fresh(self, today: datetime.date) -> bool:
        return abs(today - self.date) <= MAX_AGE  # a date far ahead is that of a clock that was wrong

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.setting), "rows": self.rows, "date": self.date.isoformat()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "_Entry":
        """Raises KeyError, TypeError or ValueError for what is no such entry."""
        names = [field.name for field in dataclasses.fields(Setting)]
        rows = values["rows"]
        if type(rows) is not int or rows < 1:
            raise ValueError(f"rows {rows!r}")
        setting = Setting(**{name: values[name] for name in names})
        return cls(setting=setting, rows=rows, date=datetime.date.fromisoformat(values["date"]))


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()


def _path() -> Path:
    return cache_folder() / FILE_NAME


def _read() -> list[_Entry]:
    """Raises OSError, or ValueError for a file that is not of this format."""
    path = _path()
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        content = json.loads(data)
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return [_Entry.from_dict(values) for values in content["ceilings"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` is not of the format `{_FORMAT}` ({error})") from error
