"""`export-records`: converts files of records to files for people and other programs."""

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from llama_adapter.app.captioning.decisions.calibration import Calibration, read_calibration
from llama_adapter.app.captioning.decisions.decider import Decider
from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.app.jobs.exports import outputs
from llama_adapter.app.jobs.exports.sidecars import PLAIN_TEXT, XMP, Existing, Refusals, SidecarFiles
from llama_adapter.app.jobs.exports.survey import MAX_REMEMBERED, Selection, Survey, record_files, survey
from llama_adapter.app.jobs.records.manifest import runs_behind
from llama_adapter.app.pictures.inputs.tables import check_pyarrow
from llama_adapter.runtime.atomic_write import atomic_write, refuse_to_replace
from llama_adapter.runtime.errors import ExitCode, UsageError
from llama_adapter.runtime.partial import named_after
from llama_adapter.runtime.terminal.standard_output import flush_whole, write_whole
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import counted, one_line, shown_name
from llama_adapter.vision.formats import PICTURE_SUFFIXES

RecordTarget = Literal["sidecars", "xmp", "csv", "metadata", "kohya", "parquet", "jsonl"]

_BESIDE: Final = ("sidecars", "xmp")  # formats with a file for each picture
_ONE_A_PICTURE: Final = (*_BESIDE, "metadata", "kohya")  # formats with one text for each picture
_IN_PARTS: Final = ("csv", "jsonl", "parquet")
_SUFFIX: Final = re.compile(r"\.[\w-][\w.-]*")
_NUM_SHOWN: Final = 5  # of prompts in a message


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecordsJob:
    """One run of `export-records`, as plain values."""

    records: tuple[str, ...]  # files, or folders of .jsonl files
    to: RecordTarget
    out: str | None = None  # None: next to the pictures (sidecars, xmp); None or "-": stdout (csv, jsonl)
    template: str | None = None  # see `Template`; for formats with one text for each picture
    suffix: str | None = None  # replaces that of the pictures; None: .txt for sidecars; for xmp, .xmp is added
    existing: Existing | None = None  # what happens to files with another text; None: `replace` with `force`
    prompt: str | None = None
    only_answers: bool = False
    skip_unfamiliar: bool = False
    calibration: str | None = None
    threshold: float | None = None
    abstain: tuple[float, float] | None = None
    below: tuple[str, ...] = ()  # folders in which texts may be written next to pictures; empty: see `_writable`
    rows_per_file: int | None = None  # if given, `out` is a folder of files with this number of rows
    force: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.rows_per_file is not None and (self.rows_per_file < 1 or self.to not in _IN_PARTS):
            raise ValueError(
                f"rows_per_file is at least 1 and goes with {', '.join(_IN_PARTS)}, got {self.rows_per_file} with "
                f"{self.to}"
            )
        if self.below and (self.to not in _BESIDE or self.out is not None):
            raise ValueError("below goes with sidecars and xmp beside the pictures: without out")
        for name, formats in (("template", _ONE_A_PICTURE), ("suffix", _BESIDE), ("existing", _BESIDE)):
            if getattr(self, name) is not None and self.to not in formats:
                raise ValueError(f"{name} goes with {', '.join(formats)}, not with {self.to}")
        if self.suffix is not None and not _SUFFIX.fullmatch(self.suffix):
            raise ValueError(f"wanted a suffix such as .caption, got {self.suffix!r}")
        if self.suffix is not None and self.suffix.lower() in PICTURE_SUFFIXES:
            raise ValueError(f"suffix {self.suffix} is that of pictures: choose another one for texts")
        outputs.Template(self.template or "{text}")  # raises for other fields
        Rule.from_flags(self.threshold, self.abstain)  # raises for numbers out of range


def run_export_records(job: ExportRecordsJob) -> int:
    """Write the files that `job.to` names. The exit code is `FAILED` if texts of some pictures were not written.

    The files of records are read twice. Raises UsageError before anything is written, and the errors that
    runtime/problems.py lists.
    """
    calibration = None if job.calibration is None else read_calibration(job.calibration)
    decider = Decider(rule=Rule.from_flags(job.threshold, job.abstain), calibration=calibration)
    paths = record_files(job.records)
    place = _place(job, paths)
    only_answers = job.only_answers or job.to in _ONE_A_PICTURE
    selection = Selection(prompt=job.prompt, only_answers=only_answers, skip_unfamiliar=job.skip_unfamiliar)
    found = survey(paths, selection)
    _check(job, found, decider)
    rows = outputs.with_decisions(found.last_of_pictures() if job.to in _ONE_A_PICTURE else found.records(), decider)
    if job.to in _BESIDE:
        return _write_sidecars(job, found, rows)
    refusals = Refusals()
    write = _writer(job, found, decider, place, refusals)
    if job.rows_per_file is not None:
        assert place is not None, "parts have a folder"
        outputs.write_parts(rows, Path(place), suffix=job.to, rows_in_a_part=job.rows_per_file, write=write)
    else:
        with _opened(place) as file:
            write(rows, file)
    where = f"in `{place}`" if place is not None else "on stdout"
    num_rows = found.num_pictures if job.to in _ONE_A_PICTURE else found.num_taken
    _say(job, f"{counted(num_rows - refusals.count, 'record')} {where}; {_left_out(found)}")
    return _tell(refusals)


def _write_sidecars(job: ExportRecordsJob, found: Survey, rows: Iterable[outputs.Row]) -> int:
    below, template = _writable(job, found.paths), outputs.Template(job.template or "{text}")
    existing = job.existing or ("replace" if job.force else "refuse")
    text_format = XMP if job.to == "xmp" else PLAIN_TEXT
    with SidecarFiles(job.out, existing=existing, below=below, text_format=text_format, suffix=job.suffix) as files:
        for row in rows:
            text = template.fill(row)
            files.write(row.picture, one_line(text) if job.to == "sidecars" else text)
    kept = f", {files.num_kept} with another text kept" if files.num_kept else ""
    _say(job, f"{counted(files.num_written, 'text')} written, {files.num_same} there already{kept}; {_left_out(found)}")
    if files.other_name is not None:
        picture, name = map(shown_name, files.other_name)
        note = f"note: {counted(files.num_other_names, 'text')} got another name, such as `{name}` for `{picture}`"
        why = "because the usual name was taken (pictures that differ only in suffix or case)"
        _say(job, f"{note}, {why}: other programs may not find them")
    exit_code = _tell(files.refusals)
    if files.outside is not None:
        folders = ", ".join(f"`{shown_name(folder)}`" for folder in below) or "no folder"
        named = "FOLDER" if files.outside == os.sep else shlex.quote(shown_name(files.outside))
        say(
            f"hint: {counted(files.num_outside, 'picture')} not in {folders}, where texts may be written; "
            f"--below {named} allows it there, --out FOLDER collects the texts"
        )
    return exit_code


def _writable(job: ExportRecordsJob, paths: Iterable[str]) -> list[str]:
    """The folders in which texts may be written next to pictures.

    They are limited because records may name any file of the system. By default, they are the current folder and the
    folders of the records, but never `/`. Raises UsageError for a missing folder.
    """
    for folder in job.below:
        if not os.path.isdir(folder):
            raise UsageError(f"Wanted a folder that exists as --below, got `{shown_name(folder)}`")
    if job.below:
        return list(job.below)
    folders = [os.getcwd(), *(os.path.dirname(os.path.abspath(path)) for path in paths)]
    return [folder for folder in dict.fromkeys(map(os.path.realpath, folders)) if folder != os.sep]


def _writer(
    job: ExportRecordsJob, found: Survey, decider: Decider, place: str | None, refusals: Refusals
) -> Callable[[Iterable[outputs.Row], BinaryIO], object]:
    """The function that writes rows to one file; `refusals` collects the pictures that it leaves out."""
    if job.to == "parquet":
        return partial(outputs.write_parquet, runs=[dataclasses.asdict(run) for run in runs_behind(found.paths)])
    template: dict[str, Any] = {"template": outputs.Template(job.template or "{text}"), "refusals": refusals}
    lines: Callable[[Iterable[outputs.Row]], Iterator[bytes]]
    match job.to:
        case "csv":
            lines = partial(outputs.table_lines, choices=_columns(job, found, decider), decider=decider)
        case "jsonl":
            lines = partial(outputs.jsonl_lines, decider=decider)
        case "metadata":
            folder = os.path.dirname(place or "") or "."
            lines = partial(outputs.metadata_lines, folder=folder, has_choices=bool(found.choices), **template)
        case _:
            lines = partial(outputs.kohya_lines, **template)

    def write(rows: Iterable[outputs.Row], file: BinaryIO) -> None:
        for line in lines(rows):
            write_whole(file, line)

    return write


@contextmanager
def _opened(place: str | None) -> Iterator[BinaryIO]:
    if place is not None:
        with atomic_write(place) as file:
            yield file
    else:
        sys.stdout.flush()
        with named_after("stdout"):
            yield sys.stdout.buffer
            flush_whole(sys.stdout.buffer)


def _place(job: ExportRecordsJob, paths: list[str]) -> str | None:
    """The file or folder to write; None for stdout and for sidecars. Raises UsageError if it cannot be used."""
    if not paths:
        raise UsageError(f"No .jsonl file in {', '.join(f'`{name}`' for name in job.records)}")
    if job.to in _BESIDE:
        if job.out == "-":
            raise UsageError(f"--to {job.to} writes many files, not to stdout", hint="name a folder as --out")
        return None
    if job.to == "parquet":
        check_pyarrow()
    if job.out in (None, "-"):
        if job.to in ("metadata", "kohya", "parquet") or job.rows_per_file is not None:
            what = "a file" if job.rows_per_file is None else "a folder"
            what = "the pictures' folder" if job.to == "metadata" else what
            raise UsageError(f"--to {job.to} needs a place for what it writes", hint=f"name {what} as --out")
        return None
    place = str(job.out)
    if job.rows_per_file is not None:
        if any(os.path.dirname(os.path.realpath(path)) == os.path.realpath(place) for path in paths):
            raise UsageError(f"`{place}` is the folder of the records themselves", hint="name another one as --out")
        outputs.check_parts(Path(place), force=job.force)
        return place
    if job.to in ("metadata", "kohya") and (os.path.isdir(place) or place.endswith(("/", os.sep))):
        place = os.path.join(place, outputs.METADATA_NAME if job.to == "metadata" else outputs.KOHYA_NAME)
    if job.to == "metadata" and os.path.basename(place) != outputs.METADATA_NAME:
        raise UsageError(
            f"Wanted a folder, or a file of the name {outputs.METADATA_NAME} that other programs know, got "
            f"`{place}` as --out"
        )
    if os.path.exists(place) and any(os.path.samefile(place, path) for path in paths if os.path.exists(path)):
        raise UsageError(f"`{place}` is a file of answers itself", hint="name another file as --out")
    if not os.path.exists(place) or os.path.isfile(place):
        refuse_to_replace([Path(place)], force=job.force)
    return place


def _check(job: ExportRecordsJob, found: Survey, decider: Decider) -> None:
    """Check the job against the records. Raises UsageError, and prints notes on what may be unexpected."""
    if job.prompt is not None and not found.num_taken + found.num_failed + found.num_unfamiliar and found.prompts:
        raise UsageError(f"No record has the prompt {job.prompt!r}", hint=f"there are: {_shown(found.prompts)}")
    if job.to in _ONE_A_PICTURE and found.has_several_prompts:
        raise UsageError(
            f"--to {job.to} stores one text for each picture, and some pictures have answers to several prompts",
            hint=f"choose one with --prompt; there are: {_shown(found.prompts)}",
        )
    if found.num_repeated:
        which = "the last one counts" if job.to in _ONE_A_PICTURE else "all are kept"
        _say(job, f"note: {counted(found.num_repeated, 'answer')} came again (new model, settings or content): {which}")
    if decider.calibration is not None:
        _check_calibration(job, found, decider, decider.calibration)


def _check_calibration(job: ExportRecordsJob, found: Survey, decider: Decider, calibration: Calibration) -> None:
    for choices in found.choices:
        if not calibration.fits(dict.fromkeys(choices)):
            raise UsageError(
                f"`{job.calibration}` is for the choices {', '.join(calibration.choices)}, and there are records "
                f"with the choices {', '.join(choices)}",
                hint="choose records by --prompt, or calibrate these choices",
            )
    runs = [run for run in runs_behind(found.paths) if run.run in found.runs]
    prompts = [prompt for prompt in found.prompts if job.prompt in (None, prompt)]
    for note in decider.doubts(prompts=prompts, model_digests=[run.model_digest for run in runs]):
        _say(job, note)


def _columns(job: ExportRecordsJob, found: Survey, decider: Decider) -> list[str]:
    """The choices that get a column in a table."""
    if decider.calibration is not None:
        return list(decider.calibration.choices)
    names = list(dict.fromkeys(name for choices in found.choices for name in choices))
    if len(names) > MAX_REMEMBERED:
        _say(job, f"note: more than {MAX_REMEMBERED} different choices: there is no column for each")
        return []
    return names


def _tell(refusals: Refusals) -> int:
    for line in refusals.lines():
        say(line)
    return ExitCode.FAILED if refusals.count else ExitCode.OK


def _left_out(found: Survey) -> str:
    failed = "without an answer, left out" if found.selection.only_answers else "without an answer"
    unfamiliar = f", {found.num_unfamiliar} unfamiliar, left out" if found.selection.skip_unfamiliar else ""
    return f"{found.num_failed} {failed}, {found.num_superseded} superseded{unfamiliar}"


def _shown(prompts: Iterable[str]) -> str:
    names = [repr(prompt) for prompt in prompts]
    return ", ".join(names[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")


def _say(job: ExportRecordsJob, text: str) -> None:
    if not job.quiet:
        say(text)
