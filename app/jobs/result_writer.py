"""Writes the answers of a job: records to a file and stdout, notes and progress to stderr."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial

from llama_adapter.app.captioning.decisions.decider import Decider
from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import Asked, JobPlanner
from llama_adapter.app.jobs.progress import Progress
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.manifest import EndReason, RunManifest, new_run_id, write_manifest
from llama_adapter.app.jobs.records.record import Record, answer_to_record, json_line
from llama_adapter.app.jobs.report import Tally
from llama_adapter.app.jobs.wording import several_lines, text_line, unfamiliar_note
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError
from llama_adapter.runtime.terminal.run_guarded import forget_stdout
from llama_adapter.runtime.terminal.standard_output import give
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import counted, shown_name


class JobStoppedError(LlamaAdapterError):
    """A job begins no more pictures: an input disappeared, or too many pictures failed."""


class ResultWriter(AbstractContextManager["ResultWriter"]):
    """Writes answers as they come. `write`, `say` and `show_progress` are thread-safe."""

    def __init__(
        self,
        job: Job,
        planner: JobPlanner,
        *,
        file: RecordWriter | None,
        manifest: RunManifest | None,
        decider: Decider | None = None,
        count: Callable[[], int | None] | None = None,
    ) -> None:
        """`manifest` is that of this run, which is written again at the end; `decider` is for text output."""
        is_one_each = job.items is None and (job.inputs.is_text or len(job.questions) == 1)  # question about each
        one = "prompt" if job.inputs.is_text else "picture"
        self.tally = Tally(what="answer" if job.n > 1 else one if is_one_each else "question")
        # The reason to begin no more pictures, if there is one; `exit_code` raises it.
        self.problem: JobStoppedError | None = None
        self.end_reason: EndReason = "failed"  # `finish` replaces it
        self._job, self._planner, self._file, self._manifest = job, planner, file, manifest
        self._run = new_run_id() if manifest is None else manifest.run
        self._decider = decider
        self._lock = threading.RLock()
        self._is_finished = False
        self._format = job.format or ("text" if sys.stdout.isatty() else "jsonl")
        self._on_stdout = job.out is None or job.format is not None
        is_in_the_way = self._on_stdout and sys.stdout.isatty()
        self._progress = Progress(visible=not job.quiet and not is_in_the_way, what=self.tally.what, count=count)
        # On a terminal, the line of an answer waits for the lines of earlier questions. A resumed job skips questions,
        # so its lines do not wait.
        is_in_order = is_in_the_way and self._format == "text" and planner.earlier is None
        self._waiting: dict[int, Callable[[], None]] | None = {} if is_in_order else None  # by question index
        self._next_index = self._num_written = 0
        is_one_text = job.inputs.is_text and not job.inputs.prompt_files and len(job.questions) == 1
        self._is_single = is_one_text and job.n == 1  # text is printed without a name
        self._shown = ""  # the part of that text printed so far

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # the second Ctrl-C
            self.end_reason = "interrupted"
        self.close()

    @property
    def num_failed(self) -> int:
        """Failures of this run, and of earlier ones that were not tried again."""
        return self.tally.num_failed + self._planner.num_known_failed

    def write(self, answer: Answer) -> None:
        """Write one answer. After `finish`, do nothing: the next run asks the question again."""
        with self._lock:
            if not self._is_finished:
                self._write(answer)

    def write_moved(self) -> None:
        """Write the records of pictures that earlier runs answered under another name."""
        with self._lock:
            while not self._planner.moved.empty():
                record = self._planner.moved.get()
                if self._file is not None:
                    self._file.write({**record, "run": self._run})

    def _write(self, answer: Answer) -> None:
        self.write_moved()
        asked: Asked = answer.tag
        if (
            answer.error is not None
            and answer.error.code in ("missing", "unreadable")
            and asked.root is not None
            and not os.path.exists(asked.root)
        ):
            # Not recorded as a failure, so that a later run answers it.
            self.problem = JobStoppedError(
                f"`{shown_name(asked.root)}` disappeared during this run: its other pictures were not answered",
                hint=f"restore it; {how_to_go_on(self._job)}",
            )
            return
        self.tally.add(answer)
        record = answer_to_record(answer, key=asked.key, run=self._run, supersedes=asked.supersedes)
        most = self._job.max_errors
        if answer.error is not None and most is not None and self.tally.num_failed >= most:
            self.problem = self.problem or JobStoppedError(
                f"{self.tally.num_failed} failed, as many as --max-errors allows: no more were begun",
                hint=f"see the errors above or in the records; {how_to_go_on(self._job)}",
            )
        if self._manifest is not None:
            self._manifest.counts[record["finish"]] = self._manifest.counts.get(record["finish"], 0) + 1
        # If a question fails again, its record already exists.
        has_record = asked.has_failed and answer.error is not None and not asked.supersedes
        if self._file is not None and not has_record:
            self._file.write(record)
            self._num_written += 1
        self._show_in_order(answer.index, partial(self._show, record))
        self.show_progress()

    def show_piece(self, piece: TextDelta) -> None:
        """Show new text, if there is only one prompt and stdout is a terminal."""
        if self._is_single and self._waiting is not None:
            self._give(several_lines(piece.text))
            self._shown += piece.text

    def _show_in_order(self, index: int, show: Callable[[], None]) -> None:
        """Show an answer now, or as soon as all earlier ones are shown."""
        if self._waiting is None:
            return show()
        self._waiting[index] = show
        while (following := self._waiting.pop(self._next_index, None)) is not None:
            self._next_index += 1
            following()

    def _show_waiting(self) -> None:
        """The run ended early: show the answers that wait for earlier ones, which will not come."""
        for _, show in sorted((self._waiting or {}).items()):
            show()
        self._waiting = None

    def _show(self, record: Record) -> None:
        if record["error"] is not None:
            is_recorded = self._file is not None or self._format == "jsonl"
            self.say(f"error: {record['error']['message']}", even_if_quiet=not is_recorded)
        if self._on_stdout:
            self._print(record)

    def show_progress(self) -> None:
        """Show progress; `Progress` limits how often."""
        with self._lock:
            self._progress.show(
                answered=self.tally.num_pictures, failed=self.tally.num_failed, known=self._planner.num_known
            )

    def _summarise(self, wall_s: float, *, waited_s: float) -> None:
        """Print on stderr how many were answered, unless all answers are visible on the terminal."""
        tally, known, known_failed = self.tally, self._planner.num_known, self._planner.num_known_failed
        is_in_sight = self._on_stdout and self._format == "text" and sys.stdout.isatty()
        if is_in_sight and not self.num_failed and self._file is None:
            return
        done = "encoded" if self._job.is_encoding else "given" if tally.what == "answer" else "answered"
        parts = [f"{counted(tally.num_pictures, tally.what)} {done}"]
        if tally.num_failed:
            parts.append(f"{tally.num_failed:,} failed")
        if known - known_failed:
            moved = self._planner.num_moved
            names = f" ({moved:,} under another name, which has a new record now)" if moved else ""
            parts.append(f"{known - known_failed:,} {done} by an earlier run{names}")
        if known_failed:
            parts.append(f"{known_failed:,} failed in an earlier run (--retry-errors tries them again)")
        rate = f", {tally.num_pictures / wall_s:.2f} {tally.what}s/s" if tally.num_pictures else ""
        is_worth_telling = tally.num_pictures and waited_s > 0.05 * wall_s and not self._job.inputs.is_text
        waited = f", {waited_s / wall_s:.0%} of it waiting for pictures to be read" if is_worth_telling else ""
        has_records = known or self._num_written
        written = f"; the records are in `{shown_name(self._file.path)}`" if self._file and has_records else ""
        self.say(f"{', '.join(parts)} in {wall_s:.1f} s{rate}{waited}{written}")

    def finish(self, wall_s: float, *, waited_s: float, is_interrupted: bool) -> None:
        """Sync the records, and print what was done and how to continue. Raises the errors of `RecordWriter.sync`."""
        with self._lock:
            self._is_finished = True
            self._show_waiting()
            self.write_moved()
        if self._file is not None:
            self._file.sync()
        self._summarise(wall_s, waited_s=waited_s)
        if note := unfamiliar_note(self.tally, has_records=self._file is not None):
            self.say(note)
        self.end_reason = "interrupted" if is_interrupted else "failed" if self.problem else "finished"
        if is_interrupted:
            self.say(f"interrupted: {how_to_go_on(self._job)}")

    def exit_code(self) -> ExitCode:
        """The exit code after `finish`. Raises JobStoppedError if the run had to stop."""
        if self.problem is not None:
            raise self.problem
        if self.end_reason == "interrupted":
            return ExitCode.INTERRUPTED
        return ExitCode.PICTURE_ERRORS if self.num_failed else ExitCode.OK

    def say(self, text: str, *, even_if_quiet: bool = False) -> None:
        """Print a note on stderr, unless the job is quiet."""
        if even_if_quiet or not self._job.quiet:
            with self._lock:
                self._progress.clear()
                say(text)

    def close(self) -> None:
        """Write the end of the run into the manifest. If that fails, as on a full disk, only print a note."""
        with self._lock:
            self._is_finished = True
            with suppress(BrokenPipeError):
                self._show_waiting()
            self._progress.clear()
        if self._manifest is None or self._job.out is None:
            return
        self._manifest.end(self.end_reason)
        try:
            write_manifest(self._job.out, manifest=self._manifest)
        except OSError as error:
            self.say(f"note: the end of this run is not in its manifest: {error.strerror}", even_if_quiet=True)

    def _print(self, record: Record) -> None:
        """Print one record on stdout and flush it."""
        if self._format == "jsonl":
            line = json_line(record)
        elif self._is_single and (record["error"] is None or self._shown):
            line = several_lines(record["text"].removeprefix(self._shown)) if record["error"] is None else ""
        elif record["error"] is None:
            # The prompt is printed if pictures may have several questions.
            with_prompt = len(self._job.questions) > 1 or bool(self._job.inputs.manifests)
            line = text_line(record, decider=self._decider, with_prompt=with_prompt)
        else:  # errors are on stderr
            return
        self._give(line + "\n")

    def _give(self, text: str) -> None:
        try:
            # Written as bytes, because the encoding of stdout may lack characters of the answer.
            give(text.encode(errors="backslashreplace"))
        except BrokenPipeError:
            if self._file is None:
                raise
            forget_stdout()  # the run continues, to complete the record file


def how_to_go_on(job: Job) -> str:
    """A sentence on how to continue after a run that ended early."""
    if job.out is None:
        return "run the same command again; with --out, it would go on where this one ended"
    if job.overwrite:
        return "the same command without --overwrite goes on where this one ended; with it, it starts over"
    return "the same command goes on where this one ended"
