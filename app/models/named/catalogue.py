"""The catalogue of published weights: parts of models by kind and name, see `catalogue.yaml`."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from llama_adapter.app.models.named.file_source import FileSource
from llama_adapter.app.models.named.hub_source import SCHEME, HubSource
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.yaml_file import Table, read_yaml

CATALOGUE: Final = "LLAMA_ADAPTER_CATALOGUE"  # a file that replaces the catalogue of the package

Kind = Literal["llama", "adapter", "clip"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FILE = re.compile(r"https?://.+/[\w+-][\w.+-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The weights of a LLaMA, an adapter or a CLIP: an entry of the catalogue, or an address of the Hub.

    Raises ValueError if it has not exactly one source, or a `url` without digest.
    """

    kind: Kind
    name: str
    title: str
    licence: str  # "": the source is asked
    hub: str | None = None  # OWNER/NAME[@REVISION][/FILE]
    url: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    page: str = ""  # of the licence; "": the repository's
    asks: bool = False  # whether access must be asked for on the page
    llama: str | None = None  # of an adapter: names of the other parts of its model
    clip: str | None = None
    visual_heads: int | None = None  # of an adapter, if its width is not 768
    size: str | None = None  # of a LLaMA, as in `parse_size`

    @classmethod
    def at(cls, address: str, kind: Kind) -> Self:
        """The weights at an address `hf:OWNER/NAME`. Raises UsageError."""
        title = HubSource.parse(address).repo
        return cls(kind=kind, name=address, title=title, licence="", hub=address.removeprefix(SCHEME))

    @property
    def source(self) -> HubSource | FileSource:
        """Where the weights come from. A LLaMA needs its tokenizer too."""
        if self.hub is not None:
            return HubSource.parse(SCHEME + self.hub, needs_tokenizer=self.kind == "llama")
        return FileSource(url=self.url or "", sha256=self.sha256 or "", bytes=self.bytes, page=self.page)

    @property
    def home(self) -> str:
        """The page of the licence."""
        return self.page or self.source.page

    @property
    def others(self) -> dict[Kind, str]:
        """The names of the other parts of an adapter's model."""
        named: dict[Kind, str | None] = {"llama": self.llama, "clip": self.clip}
        return {kind: name for kind, name in named.items() if name is not None}

    def is_at(self, *, repo: str, file: str) -> bool:
        """Whether these are weights of the repository `repo`, or of the file `file`."""
        return (self.hub or "").partition("@")[0] == repo != "" or (self.url or "").rpartition("/")[2] == file

    def __post_init__(self) -> None:
        if (self.hub is None) == (self.url is None):
            raise ValueError("wanted either hub or url")
        if self.url is not None and not (self.page and _DIGEST.fullmatch(self.sha256 or "")):
            raise ValueError("a url needs its sha256, 64 hexadecimal digits, and the page of its licence")
        if self.url is not None and not _FILE.fullmatch(self.url):
            raise ValueError("wanted a url that ends with the name of a file")


Catalogue = Mapping[Kind, Mapping[str, Part]]


def read_catalogue() -> Catalogue:
    """The catalogue: the file that LLAMA_ADAPTER_CATALOGUE names, or that of the package.

    Raises UsageError, which names the line, for entries of another form, and for a file that cannot be read.
    """
    return _read(os.environ.get(CATALOGUE) or str(Path(__file__).with_name("catalogue.yaml")))


def find_part(kind: Kind, name: str) -> Part | None:
    """The entry of this kind and name. Capitals do not matter. Raises as `read_catalogue`."""
    return read_catalogue()[kind].get(name.lower())


def find_parts(name: str) -> dict[Kind, Part]:
    """The parts of the model `name`: those of an adapter, or a LLaMA alone; a CLIP is a part of its own.

    Empty if the catalogue has no such name. Raises as `read_catalogue`.
    """
    adapter = find_part("adapter", name)
    if adapter is None:
        found = find_part("llama", name) or find_part("clip", name)
        return {} if found is None else {found.kind: found}
    names = {**adapter.others, adapter.kind: adapter.name}
    return {kind: read_catalogue()[kind][names[kind]] for kind in KINDS if kind in names}


@lru_cache(maxsize=4)
def _read(path: str) -> Catalogue:
    table = read_yaml(path)
    if unknown := [key for key in table if key not in KINDS or not isinstance(table[key], Table)]:
        place = f"{path}:{table.lines[unknown[0]]}"
        raise UsageError(f"{place}: wanted the sections {', '.join(KINDS)} with entries, got `{unknown[0]}`")
    found: dict[Kind, dict[str, Part]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        entries: Table = table.get(kind, Table())
        for name, entry in entries.items():
            place = f"{path}:{entries.lines[name]}: {name}"
            if not isinstance(entry, Mapping) or not _NAME.fullmatch(name):
                raise UsageError(f"{place}: wanted a name in small letters, digits, dots and dashes, and its entry")
            found[kind][name] = _part(kind, name, entry, place)
    for part in found["adapter"].values():
        for kind, other in part.others.items():
            if other not in found[kind]:
                raise UsageError(f"{path}: {part.name}: the catalogue has no {kind} `{other}`")
    return found


def _part(kind: Kind, name: str, entry: Mapping[str, Any], place: str) -> Part:
    types = {field.name: field.type for field in dataclasses.fields(Part) if field.name not in ("kind", "name")}
    for key, value in entry.items():
        wanted = types.get(key)
        if wanted is None or type(value) not in (wanted, *getattr(wanted, "__args__", ())):
            raise UsageError(f"{place}: `{key}` is no key of an entry, or has a value of another type")
    try:
        return Part(kind=kind, name=name, **entry)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{place}: {error}") from None
