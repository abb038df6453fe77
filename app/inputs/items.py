"""What users name, and what comes of it: one item for each picture, or prompt without one. Plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError

if TYPE_CHECKING:  # imports Pillow
    from llama_adapter.app.prefixes.file import PrefixRow
    from llama_adapter.app.reading.sources import FileSlice


class InputsError(LlamaAdapterError):
    """A list, manifest or sheet of questions is unusable as a whole. Errors of one picture belong to its item."""

    exit_code = ExitCode.USAGE
    http_status = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class InputSpec:
    """Where pictures come from: `paths`, then `lists`, then `manifests`. With `is_text`, there are prompts alone."""

    paths: tuple[str, ...] = ()  # files, folders, patterns, tar archives and prefix files
    lists: tuple[str, ...] = ()  # files with a file, folder or archive in each line; `-` is stdin
    manifests: tuple[str, ...] = ()  # JSONL, CSV or TSV with a picture in each line
    is_text: bool = False  # no pictures: the rows of `prompt_files`, or without them the job's own prompt
    prompt_files: tuple[str, ...] = ()  # TXT, JSON, JSONL, CSV or TSV; `-` is stdin
    are_raw: bool = False  # prompts of files are given to the model without the instruction template
    recursive: bool = False  # descend into the folders of folders
    limit: int | None = None  # only the first N pictures; of a shard, its first N
    shard: tuple[int, int] | None = None  # (i, n): part i of n, counted from 0, by the digest of the label

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if self.shard is not None:
            index, count = self.shard
            if not 0 <= index < count:
                raise ValueError(f"shard must be i/n with i from 0 to n - 1, got {index}/{count}")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionFields:
    """A question as a file gives it; None stands for the job's value. Texts about pictures may contain {variables}."""

    instruction: str | None = None
    input: str | None = None
    choices: tuple[str, ...] | None = None  # at least two
    raw: str | None = None  # in place of an instruction, without the template


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureInput:
    """One picture to answer for, readable or not; or a prompt without one."""

    source: "str | bytes | FileSlice | PrefixRow | None"  # a path, bytes, an encoded picture; None: there is no picture
    label: str  # its name in records; bytes that are not UTF-8 are surrogates
    root: str | None = None  # the folder or archive that the user named and this lies in, if any
    repeats: str = ""  # of a picture in an archive: the label of the earlier one whose name it has there too
    found_in: tuple[str, ...] = ()  # labels of the pattern, folders, archive and line that led to it
    columns: Mapping[str, str] = field(default_factory=dict)  # of a manifest or a sample, for templates
    questions: tuple[QuestionFields, ...] = ()  # a manifest's own for this picture; empty: the job's
    error: AnswerError | None = None  # why there is nothing to open
    digest: str = ""  # of a picture with an error that was read elsewhere

    @classmethod
    def failed(cls, label: str, code: str, message: str, *, source: str | None = None, root: str | None = None) -> Self:
        """An item without a picture. `source` is `label` by default."""
        source = label if source is None else source
        return cls(source=source, label=label, root=root, error=AnswerError(code=code, message=message))

    @property
    def path(self) -> str:
        """The path of a picture that is a file of its own, as all of `expand_inputs` are."""
        assert isinstance(self.source, str), f"{self.label} is no file of its own"
        return self.source
