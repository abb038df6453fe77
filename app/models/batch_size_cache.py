"""A small file of batch sizes that fitted into memory in earlier runs, for batch size `auto`.

`batch-ceilings.json` is in the user's cache folder, `$XDG_CACHE_HOME/llama-adapter`. An entry is for one `Setting`. It
expires after 30 days, because another program may have used memory at that time. With a numeric batch size, the file is
neither read nor written. The file may be deleted.
"""

import dataclasses
import datetime
import json
from typing import Any, Final

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.user_cache import cache_folder

FILE_NAME: Final = "batch-ceilings.json"
MAX_AGE: Final = datetime.timedelta(days=30)
_FORMAT: Final = "llama-adapter batch ceilings 1"

Entry = dict[str, Any]  # the fields of a Setting, "rows" and "date", as JSON values


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The values that a remembered batch size depends on."""

    model: str  # digest of the weights
    device: str
    dtype: str
    precision: str
    context: int
    mode: str  # graphs need additional memory
    device_bytes: int | None  # memory of the device

    def ceiling(self, *, today: datetime.date | None = None) -> tuple[int | None, str]:
        """The largest batch size that is known to fit, if any, and a note for the user if the file is unreadable."""
        try:
            entries = _read()
        except (OSError, ValueError) as error:
            return None, f"remembered batch sizes are ignored, because their file cannot be read: {error}"
        own = [entry["rows"] for entry in entries if _is_fresh(entry, today) and self._is_of(entry)]
        return (own[-1] if own else None), ""

    def remember(self, rows: int, *, today: datetime.date | None = None) -> str:
        """Replace the batch size of this setting; returns a note for the user if that fails.

        An unreadable file is replaced. If two processes write at the same time, the later write wins.
        """
        try:
            entries = _read()
        except (OSError, ValueError):
            entries = []
        kept = [entry for entry in entries if _is_fresh(entry, today) and not self._is_of(entry)]
        own = {**dataclasses.asdict(self), "rows": rows, "date": (today or _today()).isoformat()}
        try:
            with atomic_write(cache_folder() / FILE_NAME) as file:
                file.write(json.dumps({"format": _FORMAT, "ceilings": [*kept, own]}, indent=1).encode() + b"\n")
        except OSError as error:
            return f"the batch size cannot be remembered for other runs: {error}"
        return ""

    def _is_of(self, entry: Entry) -> bool:
        return dataclasses.asdict(self).items() <= entry.items()


def _is_fresh(entry: Entry, today: datetime.date | None) -> bool:
    # A date far in the future comes from a wrong clock.
    return abs((today or _today()) - datetime.date.fromisoformat(entry["date"])) <= MAX_AGE


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()


def _read() -> list[Entry]:
    """The entries. Raises OSError, or ValueError for a file of another format."""
    path = cache_folder() / FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        content = json.loads(data)
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        entries: list[Entry] = list(content["ceilings"])
        for entry in entries:
            datetime.date.fromisoformat(entry["date"])
            if type(entry["rows"]) is not int or entry["rows"] < 1:
                raise ValueError(f"rows {entry['rows']!r}")
        return entries
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` is not of the format `{_FORMAT}` ({error})") from error
