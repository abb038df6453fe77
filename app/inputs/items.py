"""What is worked on: one picture as the user named it, or why it cannot even be named. Plain values, opens nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llama_adapter.app.tasks.answers import AnswerError

if TYPE_CHECKING:  # its module brings Pillow with it
    from llama_adapter.app.reading.sources import FileSlice


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionFields:
    """A question as a file says it; what is None is the job's. Texts may hold {variables}, which are filled elsewhere.

    `choices` are at least two where there are any.
    """

    instruction: str | None = None
    input: str | None = None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureInput:
    """One picture to answer for, whether or not it can be read."""

    source: "str | bytes | FileSlice"  # what to open, or the file itself
    # The name as records have it; undecodable bytes are surrogates. Messages show it by `shown_name`.
    label: str
    root: str | None = None  # the folder or archive that the user named and that this lies in; none: named itself
    found_in: tuple[str, ...] = ()  # labels of the pattern, folders, archive and line that gave it
    columns: Mapping[str, str] = field(default_factory=dict)  # of a manifest or a sample, for templates
    questions: tuple[QuestionFields, ...] = ()  # a manifest's own for this picture; none means the job's
    error: AnswerError | None = None  # why this cannot even be named: there is nothing to open then

    @property
    def path(self) -> str:
        """The name of a picture that is a file of its own, as all are that `expand_inputs` gives."""
        assert isinstance(self.source, str), f"{self.label} is no file of its own"
        return self.source
