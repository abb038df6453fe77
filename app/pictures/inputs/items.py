"""Inputs as the user gives them, and the items made from them: one for each picture or prompt. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.text import shown_name

if TYPE_CHECKING:  # imports Pillow
    from llama_adapter.app.pictures.prefixes.file import PrefixRow
    from llama_adapter.app.pictures.reading.sources import FileSlice


class InputsError(LlamaAdapterError):
    """A list, manifest or sheet of questions is unusable as a whole. An error of one picture is stored in its item."""

    exit_code = ExitCode.USAGE
    http_status = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """Where pictures come from: `paths`, then `lists`, then `manifests`. With `is_text`, there are only prompts."""

    paths: tuple[str, ...] = ()  # files, folders, patterns, tar archives and prefix files
    lists: tuple[str, ...] = ()  # files with the name of a file, folder or archive in each line; `-` is stdin
    manifests: tuple[str, ...] = ()  # JSONL, CSV or TSV with a picture in each line
    is_text: bool = False  # no pictures, but the rows of `prompt_files`; without these, the job's own prompt
    prompt_files: tuple[str, ...] = ()  # TXT, JSON, JSONL, CSV or TSV; `-` is stdin
    are_raw: bool = False  # prompts of files are given to the model without the instruction template
    recursive: bool = False  # descend into sub-folders
    sample_fields: tuple[str, ...] | None = None  # of archives: the field of the picture, and that of the text
    limit: int | None = None  # only the first N pictures; with `shard`, the first N of the shard
    shard: tuple[int, int] | None = None  # (i, n): part i of n, counted from 0, by the digest of the label

    def __post_init__(self) -> None:
        require_least(self, "limit")
        if self.shard is not None:
            index, count = self.shard
            if not 0 <= index < count:
                raise ValueError(f"shard must be i/n with i from 0 to n - 1, got {index}/{count}")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionFields:
    """A question in a file; None means the job's value. Texts about pictures may contain {variables}."""

    instruction: str | None = None
    input: str | None = None
    choices: tuple[str, ...] | None = None  # at least two
    raw: str | None = None  # instead of an instruction; used without the template


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureInput:
    """One picture to answer questions about, readable or not; or a prompt without a picture."""

    source: "str | bytes | FileSlice | PrefixRow | None"  # a path, bytes, an encoded picture; None: there is no picture
    label: str  # the name in records; bytes that are not UTF-8 are surrogates
    root: str | None = None  # the folder or archive that the user named and that contains this
    repeats: str = ""  # label of an earlier picture with the same name in the same archive
    found_in: tuple[str, ...] = ()  # labels of the pattern, folders, archive and line through which it was found
    columns: Mapping[str, str] = field(default_factory=dict)  # from a manifest or a sample; for templates
    questions: tuple[QuestionFields, ...] = ()  # from a manifest, for this picture; empty: the job's
    error: AnswerError | None = None  # the reason, if there is no picture to open
    digest: str = ""  # for a picture with an error that was read elsewhere
    is_elsewhere: bool = False  # belongs to another shard, which records its error; this one only tells it

    @classmethod
    def failed(cls, label: str, code: str, message: str, *, source: str | None = None, root: str | None = None) -> Self:
        """An item without a picture. `source` is `label` by default."""
        source = label if source is None else source
        return cls(source=source, label=label, root=root, error=AnswerError(code=code, message=message))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a table, or one line of a text. A malformed row has a `problem`, the reason in words, and no values.

    Names of known columns are in lower case; other columns keep theirs.
    """

    line: int  # the line in which the row begins, or the number of an object in a list, counted from 1
    values: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""

    def checked(self) -> Mapping[str, object]:
        """The values. Raises ValueError with the problem of a malformed row."""
        if self.problem:
            raise ValueError(self.problem)
        return self.values


@dataclass(slots=True)
class LeftOut:
    """Numbers of what was left out, by kind, each with its first place. Kinds are plurals: "pictures without text"."""

    _found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, kind: str, place: str, *, number: int = 1) -> None:
        """Count `number` more of a kind; `place` is where the first of them is."""
        before, first = self._found.get(kind, (0, place))
        self._found[kind] = before + number, first

    def extend(self, other: "LeftOut") -> None:
        """Add what `other` has counted."""
        for kind, (number, place) in other._found.items():
            self.add(kind, place, number=number)

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self) -> str:
        """All counts in one line; empty if nothing was left out."""
        return ", ".join(
            f"{kind}: {number:,} (first: {shown_name(place)})" for kind, (number, place) in self._found.items()
        )
