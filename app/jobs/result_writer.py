"""Writes answers where they are wanted: records into a file and on stdout, talk and progress on stderr."""

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from llama_adapter.app.calibration.decider import Decider
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.progress import Progress
from llama_adapter.app.measuring.report import Tally
from llama_adapter.app.records.folder import RecordStore
from llama_adapter.app.records.manifest import EndReason, RunManifest, write_manifest
from llama_adapter.app.records.record import Record, record_to_line
from llama_adapter.app.tasks.answers import Answer
from llama_adapter.app.terminal.run_guarded import forget_stdout
from llama_adapter.app.terminal.standard_output import give
from llama_adapter.app.terminal.stderr_lines import say
from llama_adapter.app.terminal.wording import Unfamiliar, counted, text_line
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError
from llama_adapter.runtime.text import shown_name


class InputGoneError(LlamaAdapterError):
    """What the user named was there and is not any more, such as a folder of a server that went away."""

    def __init__(self, root: str, *, hint: str = "bring it back and run the same command again") -> None:
        super().__init__(
            f"`{shown_name(root)}` was there when this began, and is gone: its other pictures were not answered",
            hint=hint,
        )


class TooManyErrorsError(LlamaAdapterError):
    """So many pictures failed that something else must be wrong."""

    def __init__(self, num_failed: int, *, job: Job) -> None:
        super().__init__(
            f"{num_failed} failed, as many as --max-errors allows: no more were begun",
            hint=f"see the errors above or in the records, and mend what is wrong; {how_to_go_on(job)}",
        )


class ResultWriter:
    """Puts answers out as they come. Threads may call `write`, `say` and `show_progress`; the rest is of one thread."""

    def __init__(
        self,
        job: Job,
        planner: JobPlanner,
        *,
        file: RecordStore | None,
        manifest: RunManifest | None,
        decider: Decider | None = None,
        count: Callable[[], int | None] | None = None,
    ) -> None:
        """`manifest` is written now, and again at the end; `decider` is for texts alone; `count` as in `Progress`."""
        self.tally, self._unfamiliar = Tally(), Unfamiliar()
        self._problem: InputGoneError | TooManyErrorsError | None = None
        self.end_reason: EndReason = "failed"  # until the end comes otherwise
        self._job, self._planner, self._file, self._manifest = job, planner, file, manifest
        self._decider = decider
        self._lock = threading.RLock()
        self._is_finished = False
        self._format = job.format or ("text" if sys.stdout.isatty() else "jsonl")
        self._on_stdout = job.out is None or job.format is not None
        is_in_the_way = self._on_stdout and sys.stdout.isatty()
        self._progress = Progress(visible=not job.quiet and not is_in_the_way, what=self._what, count=count)
        if manifest is not None and job.out is not None:
            write_manifest(job.out, manifest=manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt:  # the second one, which does not wait for an end
            self.end_reason = "interrupted"
        self.close()

    @property
    def has_to_stop(self) -> bool:
        """Whether no more pictures should be begun, for a reason that `exit_code` raises."""
        return self._problem is not None

    @property
    def num_failed(self) -> int:
        """Failures that stand: of this run, and of earlier ones that were not tried again."""
        return self.tally.num_failed + self._planner.num_known_failed

    def write(self, answer: Answer) -> None:
        """Put one answer out."""
        with self._lock:
            if not self._is_finished:  # else it was drawn after the end, and the next run asks it
                self._write(answer)

    def _write(self, answer: Answer) -> None:
        asked = self._planner.asked(answer)
        if (
            answer.error is not None
            and answer.error.code == "missing"
            and asked.root is not None
            and not os.path.exists(asked.root)
        ):
            # No fault of the picture: it is answered when it is back.
            self._problem = InputGoneError(asked.root, hint=f"bring it back; {how_to_go_on(self._job)}")
            return
        self.tally.add(answer)
        self._unfamiliar.add(answer)
        record = self._planner.record(answer, asked)
        if answer.error is not None:
            is_recorded = self._file is not None or self._format == "jsonl"
            self.say(f"error: {answer.error.message}", even_if_quiet=not is_recorded)
            if self._job.max_errors is not None and self.tally.num_failed >= self._job.max_errors:
                self._problem = self._problem or TooManyErrorsError(self.tally.num_failed, job=self._job)
        if self._manifest is not None:
            self._manifest.count(record)
        # What failed again as it did before has its record.
        has_record = asked.has_failed and answer.error is not None and not asked.supersedes
        if self._file is not None and not has_record:
            self._file.write(record)
        if self._on_stdout:
            self._print(record)
        self.show_progress()

    def show_progress(self) -> None:
        """Tell how far the job is, now and then; also while it only passes over what was answered before."""
        with self._lock:
            self._progress.show(
                answered=self.tally.num_pictures, failed=self.tally.num_failed, known=self._planner.num_known
            )

    def summarise(self, wall_s: float, *, waited_s: float) -> None:
        """Say on stderr what was done, where that is not in sight already."""
        tally, known, known_failed = self.tally, self._planner.num_known, self._planner.num_known_failed
        is_in_sight = self._on_stdout and self._format == "text" and sys.stdout.isatty()
        if is_in_sight and not self.num_failed:
            return
        parts = [counted(tally.num_pictures, "answered", what=self._what)]
        if tally.num_failed:
            parts.append(f"{tally.num_failed:,} failed")
        if known - known_failed:
            parts.append(f"{known - known_failed:,} answered by an earlier run")
        if known_failed:
            parts.append(f"{known_failed:,} failed in an earlier run (--retry-errors tries them again)")
        rate = f", {tally.num_pictures / wall_s:.2f} {self._what}s/s" if tally.num_pictures else ""
        is_worth_telling = tally.num_pictures and waited_s > 0.05 * wall_s
        waited = f", {waited_s / wall_s:.0%} of it waiting for pictures to be read" if is_worth_telling else ""
        self.say(f"{', '.join(parts)} in {wall_s:.1f} s{rate}{waited}")

    def finish(self, wall_s: float, *, waited_s: float, is_interrupted: bool) -> None:
        """Say what was done, and how to go on where something is left; `close` notes how it ended.

        Raises what syncing the records raises.
        """
        with self._lock:
            self._is_finished = True
        if self._file is not None:
            self._file.sync()
        self.summarise(wall_s, waited_s=waited_s)
        if note := self._unfamiliar.note(what=self._what):
            self.say(note)
        self.end_reason = "interrupted" if is_interrupted else "failed" if self.has_to_stop else "finished"
        if is_interrupted:
            self.say(f"interrupted: {how_to_go_on(self._job)}")

    def exit_code(self) -> ExitCode:
        """Of a run that was finished. Raises InputGoneError and TooManyErrorsError where it had to stop."""
        if self._problem is not None:
            raise self._problem
        if self.end_reason == "interrupted":
            return ExitCode.INTERRUPTED
        return ExitCode.PICTURE_ERRORS if self.num_failed else ExitCode.OK

    def say(self, text: str, *, even_if_quiet: bool = False) -> None:
        """A line of talk on stderr, unless it is not wanted."""
        if even_if_quiet or not self._job.quiet:
            with self._lock:
                self._progress.clear()
                say(text)

    def close(self) -> None:
        """Note the end of the run in the manifest, however it came. A disk that is full by then only costs the note."""
        with self._lock:
            self._is_finished = True
            self._progress.clear()
        if self._manifest is None or self._job.out is None:
            return
        self._manifest.end(self.end_reason)
        try:
            write_manifest(self._job.out, manifest=self._manifest)
        except OSError as error:
            self.say(f"note: the end of this run is not in its manifest: {error.strerror}", even_if_quiet=True)

    @property
    def _has_several(self) -> bool:
        """Whether a picture's name does not tell what was asked of it."""
        return len(self._job.questions) > 1 or bool(self._job.inputs.manifests)

    @property
    def _what(self) -> str:
        return "picture" if len(self._job.questions) == 1 else "question"

    def _print(self, record: Record) -> None:
        """One record on stdout, at once: whoever reads the pipe need not wait for the rest."""
        try:
            if self._format == "jsonl":
                _print_line(record_to_line(record))
            elif record["error"] is None:  # else it was told on stderr
                _print_line(text_line(record, decider=self._decider, with_prompt=self._has_several))
        except BrokenPipeError:
            if self._file is None:
                raise
            forget_stdout()  # the file is still wanted whole


def how_to_go_on(job: Job) -> str:
    """What to do after a run that ended too soon."""
    if job.out is None:
        return "run the same command again; with --out, it would go on where this one ended"
    if job.overwrite:
        return "the same command without --overwrite goes on where this one ended; with it, it begins anew"
    return "the same command goes on where this one ended"


def _print_line(line: str) -> None:
    # Bytes, since a terminal's or pipe's encoding must not decide whether an answer can be written.
    give(line.encode(errors="backslashreplace") + b"\n")
