"""The result of converting another system's settings, with a report for each key."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.defaults import DECODER_PRECISIONS
from llama_adapter.runtime.settings.setting import meant

Outcome = Literal["taken", "ignored", "refused"]

EXPORT = "export decoder"
_OF_EXPORTS = ("command", "model.", "output.")  # settings of that command
_AS_EXPORTED = dict.fromkeys(("computation.dtype", "computation.precision"), "output.decoder_precision")
_OF_GRAPHS = ("model.", *_AS_EXPORTED, "computation.operators", "computation.mode")  # an export determines them


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """The report on one key of the other system."""

    key: str  # such as `data_config.batch_size`
    line: int | None  # in its file, from 1; None: unknown
    outcome: Outcome
    text: str  # the settings that the key became, or the reason why it is ignored or refused
    file: str = ""  # the file of `line`, if it is one that a command line names

    def __str__(self) -> str:
        place = "" if self.line is None else f"{self.file}:{self.line}: " if self.file else f"line {self.line}: "
        sign = "->" if self.outcome == "taken" else f"{self.outcome}:"
        return f"{place}{self.key} {sign} {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """The converted settings of another system."""

    system: str
    settings: dict[str, Any]  # `command`, and section -> key -> value, in the names of this package
    report: tuple[Reported, ...]

    @property
    def refused(self) -> tuple[Reported, ...]:
        """The keys that are not supported."""
        return tuple(entry for entry in self.report if entry.outcome == "refused")

    def check(self, source: str | None = None, *, is_file: bool = True) -> "Imported":
        """Returns itself. Raises UsageError if a key is refused, with its line in `source`, which may be no file."""
        for entry in self.refused[:1]:
            file = entry.file or source
            place = "" if file is None else f"{file}: " if entry.line is None else f"{file}:{entry.line}: "
            more = f" ({len(self.refused)} keys are refused in all)" if len(self.refused) > 1 else ""
            says = f"`llama-adapter config import {source}` says what becomes of each key"
            raise UsageError(
                f"{place}{self.system}'s `{entry.key}` is refused: {entry.text}{more}",
                hint="leave it out, or give another value" if source is None or not is_file else says,
            )
        return self

    def flat(self) -> dict[str, Any]:
        """Key -> value, without the sections and the command."""
        tables = (table for name, table in self.settings.items() if name != "command")
        return {key: value for table in tables for key, value in table.items()}

    def format_report(self) -> str:
        """The report, with a line for each key."""
        return "".join(f"{entry}\n" for entry in self.report)


def setting_of_export(setting: str, value: Any) -> str:
    """The setting of `export decoder` for `section.key` of other commands; "" if an export does not need the value."""
    if setting in _AS_EXPORTED and value not in DECODER_PRECISIONS:
        return ""
    setting = _AS_EXPORTED.get(setting, setting)
    return setting if setting.startswith(_OF_EXPORTS) else ""


class Import:
    """Collects settings and the report. Rules call its methods."""

    def __init__(self, system: str, data: Mapping[str, Any]) -> None:
        self._system, self._data = system, data
        self.is_sampled = False  # whether the other system draws tokens; set before rules are applied
        self._settings: dict[str, Any] = {}  # `command` and `section.key` -> value
        self._report: list[Reported] = []

    def value(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path of the other system's settings."""
        found: Any = self._data
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def setting(self, setting: str) -> Any:
        """The present value of `section.key`, or of `command`."""
        return self._settings.get(setting)

    @property
    def is_export(self) -> bool:
        """Whether these become settings of `export decoder`, which ignores those of other commands."""
        return bool(self.setting("command") == EXPORT)

    def beside(self, path: str) -> Path:
        """A path in the other system's file: relative to that file if it exists there, else to the current folder."""
        place = Path(getattr(self._data, "source", "")).parent / path
        return place if place.exists() else Path(path)

    def set(self, setting: str, value: Any) -> None:
        """Set `section.key`, unless it has a value already."""
        if not self.is_export or setting.startswith(_OF_EXPORTS):
            self._settings.setdefault(setting, value)

    def take(self, key: str, settings: Mapping[str, Any], note: str = "") -> None:
        """Convert `key` to these settings (`section.key` -> value), unless an earlier key set another value."""
        if self.is_export:
            settings = {_AS_EXPORTED.get(setting, setting): value for setting, value in settings.items()}
            others = [setting for setting in settings if not setting.startswith(_OF_EXPORTS)]
            if others == list(settings):
                self.ignore(key, "an export does not need it")
                return
            if others:
                self.refuse(key, f"`{EXPORT}` has no {others[0]}")
                return
            if "bfloat16" in settings.values():
                self.ignore(key, "exported graphs have no bfloat16: they compute in float32")
                return
        elif self.setting("computation.decoder") is not None and any(name.startswith(_OF_GRAPHS) for name in settings):
            self.ignore(key, "the exported graphs determine it")
            return
        for setting, value in settings.items():
            self.set(setting, value)
            if (earlier := self.setting(setting)) != value:
                self.ignore(key, f"{setting} is {_shown(earlier)} already")
                return
        shown = ", ".join(f"{setting}: {_shown(value)}" for setting, value in settings.items())
        self._note(key, "taken", f"{shown} ({note})" if note else shown)

    def ignore(self, key: str, why: str) -> None:
        """Report that `key` has no effect."""
        self._note(key, "ignored", why)

    def refuse(self, key: str, why: str) -> None:
        """Report that `key` is not supported."""
        self._note(key, "refused", why)

    def _note(self, key: str, outcome: Outcome, text: str) -> None:
        *parents, last = key.split(".")
        table: Any = self.value(".".join(parents), {}) if parents else self._data
        line, file = getattr(table, "lines", {}).get(last), getattr(table, "files", {}).get(last, "")
        self._report.append(Reported(key=key, line=line, outcome=outcome, text=text, file=file))

    def run(self, rules: Mapping[str, "Rule"], *, first: Sequence[str] = ()) -> None:
        """Apply the rule of each key, to `first` before the others of their table.

        A key without a rule is ignored; the report has its highest unknown parent.
        """
        self._walk(self._data, "", rules, first)

    def _walk(self, table: Mapping[str, Any], prefix: str, rules: Mapping[str, "Rule"], first: Sequence[str]) -> None:
        for name in sorted(table, key=lambda name: first.index(name) if name in first else len(first)):
            key, value = f"{prefix}{name}", table[name]
            if key in rules:
                if value is None or value == "":
                    self.ignore(key, "it is empty")
                else:
                    rules[key](self, key, value)
            elif isinstance(value, Mapping) and any(rule.startswith(f"{key}.") for rule in rules):
                self._walk(value, f"{key}.", rules, first)
            else:
                self.ignore(key, "; ".join(filter(None, ("it has no meaning here", meant(key, rules, cutoff=0.9)))))

    def done(self) -> Imported:
        """The result; the report is in the order of the file."""
        tables: dict[str, Any] = {}
        for setting, value in self._settings.items():
            section, _, key = setting.partition(".")
            if key:
                tables.setdefault(section, {})[key] = value
            else:
                tables[section] = value
        report = sorted(self._report, key=lambda entry: (entry.file, entry.line or 0))
        return Imported(system=self._system, settings=tables, report=tuple(report))


Rule = Callable[[Import, str, Any], None]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
