"""What `caption` and `ask` do: pictures in, records or lines of text out, as they are ready. No flags: see cli.py."""

import dataclasses
import hashlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from app.captioner import Answer, Captioner, Prompt, RawPrompt, WorkItem
from app.clock import StageClock
from app.errors import Exit, forget_stdout
from app.inputs import PictureInput, expand_inputs
from app.record_settings import record_settings
from app.records import (
    Record,
    RecordWriter,
    RunManifest,
    answer_to_record,
    new_run_id,
    read_records,
    record_id,
    record_to_line,
    write_manifest,
)
from app.report import Tally, make_report, versions
from app.resources import sample_pictures
from app.spec import CaptionerSpec
from llm.engine.sampling_params import SamplingParams
from llm.runtime.backend import EAGER

EMBEDDED_NOTE = (
    "note: the embedded model knows drawn shapes and nothing else; for photographs pass --model, "
    "or --llama-dir, --adapter and --clip"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of every picture; nothing given means the model's own caption prompt."""

    instruction: str | None = None
    input: str | None = None
    raw: str | None = None
    choices: tuple[str, ...] | None = None

    def prompt(self, default: str) -> Prompt:
        """As the captioner takes it."""
        if self.raw is not None:
            return RawPrompt(self.raw)
        instruction = default if self.instruction is None else self.instruction
        return instruction if self.input is None else (instruction, self.input)

    def shown(self, default: str) -> str:
        """As a record shows it."""
        if self.raw is not None:
            return self.raw
        instruction = default if self.instruction is None else self.instruction
        return instruction if self.input is None else f"{instruction}\n{self.input}"

    @property
    def form(self) -> str:
        """What the shown prompt is; with `input`, it tells apart prompts that are shown alike."""
        return "instruction" if self.raw is None else "raw"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of `caption` or `ask`, as plain values."""

    spec: CaptionerSpec
    pictures: tuple[str, ...]
    recursive: bool
    question: Question
    sampling: SamplingParams
    out: str | None
    format: Literal["text", "jsonl"] | None
    profile: Literal["wait", "marks"] | None
    quiet: bool


def run_job(job: Job) -> int:
    """Answer every picture; returns the exit code.

    Interrupted once, it finishes the pictures it has begun. Raises what app/errors.py lists.
    """
    with ExitStack() as stack:
        # Before the model is loaded, which may take minutes: a place that cannot be written shows at once.
        record_file = stack.enter_context(RecordWriter(job.out)) if job.out is not None else None
        captioner = stack.enter_context(Captioner.load(**dataclasses.asdict(job.spec)))
        question = job.question
        prompt = question.prompt(captioner.info.default_prompt)
        captioner.check_prompt(prompt, question.choices)
        scribe = _Scribe(job, captioner, record_file)
        stack.callback(scribe.close)
        for note in captioner.info.notes:
            scribe.say(f"note: {note}")
        if captioner.info.mode != EAGER and question.choices is None:
            warm_up = captioner.warm_up(prompt, max_new_tokens=job.sampling.max_new_tokens)
            scribe.say(f"warm-up: {warm_up.programs} programs ready in {warm_up.seconds:.1f} s")
        clock = StageClock() if job.profile is None else captioner.profile_clock(waits=job.profile == "wait")
        interruption = stack.enter_context(_Interruption())

        def items() -> Iterator[WorkItem]:
            is_noted = not job.spec.is_embedded
            inputs = expand_inputs(job.pictures, recursive=job.recursive)
            for index, picture in enumerate(inputs):
                if interruption.requested:
                    return
                if scribe.has_answer(picture):
                    continue
                if not is_noted and not is_sample(picture.source_path):
                    scribe.say(EMBEDDED_NOTE)
                    is_noted = True
                yield WorkItem(index=index, picture=picture.source_path, label=picture.label, prompt=prompt)

        started = time.perf_counter()
        for event in captioner.run(items(), sampling=job.sampling, choices=question.choices, clock=clock):
            if isinstance(event, Answer):
                scribe.write(event)
        wall_s = time.perf_counter() - started
        scribe.summarise(wall_s)
    if job.profile is not None:
        report = make_report(
            scribe.tally,
            stages_s=clock.seconds,
            device_stages_s=clock.read_device_seconds(),
            wall_s=wall_s,
            model=captioner.info,
            batch_size=captioner.spec.batch_size,
            synchronised=job.profile == "wait",
        )
        print(report.format_table(), file=sys.stderr)
    if interruption.requested:
        return Exit.INTERRUPTED
    return Exit.PICTURE_ERRORS if scribe.tally.num_failed else Exit.OK


class _Scribe:
    """Writes answers where they are wanted, and knows which were written by earlier runs."""

    def __init__(self, job: Job, captioner: Captioner, record_file: RecordWriter | None) -> None:
        self.tally = Tally()
        self._job, self._file = job, record_file
        self._shown_prompt = job.question.shown(captioner.info.default_prompt)
        self._model_digest = captioner.info.digest
        self._settings = _settings(job, captioner)
        self._run = new_run_id()
        self._format = job.format or ("text" if sys.stdout.isatty() else "jsonl")
        self._on_stdout = job.out is None or job.format is not None
        is_in_the_way = self._on_stdout and sys.stdout.isatty()
        self._progress = _Progress(visible=not job.quiet and sys.stderr.isatty() and not is_in_the_way)
        self._num_known = 0
        self._answered, self._failed = Counter[str](), Counter[str]()  # records of earlier runs, by id
        self._manifest: RunManifest | None = None
        if job.out is not None and Path(job.out).is_file():
            for record in read_records(job.out):
                (self._answered if record["error"] is None else self._failed)[record["id"]] += 1
            self._manifest = RunManifest(
                run=self._run,
                spec=_resolved(captioner),
                model_digest=self._model_digest,
                versions=versions(),
            )
            write_manifest(job.out, manifest=self._manifest)

    def has_answer(self, picture: PictureInput) -> bool:
        """Whether an earlier run wrote this picture's answer; each record counts for one picture."""
        if not self._answered:
            return False
        digest = _file_digest(picture.source_path)
        if digest is None:
            return False
        known_id = record_id(
            digest, prompt=self._shown_prompt, model_digest=self._model_digest, sampling=self._settings
        )
        if not self._answered[known_id]:
            return False
        self._answered[known_id] -= 1
        self._num_known += 1
        return True

    def write(self, answer: Answer) -> None:
        """Put one answer out."""
        answer = dataclasses.replace(answer, prompt=self._shown_prompt)
        self.tally.add(answer)
        record = answer_to_record(answer, model_digest=self._model_digest, sampling=self._settings, run=self._run)
        if answer.error is not None:
            is_recorded = self._file is not None or self._format == "jsonl"
            self.say(f"error: {answer.error.message}", even_if_quiet=not is_recorded)
        if self._file is not None:
            self._write_to_file(record)
        if self._on_stdout:
            try:
                _print(record, as_text=self._format == "text")
            except BrokenPipeError:
                if self._file is None:
                    raise
                forget_stdout()  # the file is still wanted whole
        self._progress.show(self.tally)

    def summarise(self, wall_s: float) -> None:
        """Say on stderr what was done, where that is not in sight already."""
        tally = self.tally
        is_in_sight = self._on_stdout and self._format == "text" and sys.stdout.isatty()
        if is_in_sight and not tally.num_failed:
            return
        parts = [_count(tally.num_pictures, "answered")]
        if tally.num_failed:
            parts.append(f"{tally.num_failed} failed")
        if self._num_known:
            parts.append(f"{self._num_known} answered by an earlier run")
        rate = f", {tally.num_pictures / wall_s:.2f} pictures/s" if tally.num_pictures else ""
        self.say(f"{', '.join(parts)} in {wall_s:.1f} s{rate}")

    def say(self, text: str, *, even_if_quiet: bool = False) -> None:
        """A line of talk on stderr, unless it is not wanted."""
        if even_if_quiet or not self._job.quiet:
            self._progress.clear()
            print(text, file=sys.stderr)

    def close(self) -> None:
        """Note the end of the run in the manifest, however it came."""
        if self._manifest is not None and self._job.out is not None:
            self._manifest.end()
            write_manifest(self._job.out, manifest=self._manifest)

    def _write_to_file(self, record: Record) -> None:
        assert self._file is not None
        if self._manifest is not None:
            self._manifest.count(record)
        if record["error"] is not None and self._failed[record["id"]]:
            self._failed[record["id"]] -= 1  # tried again, failed again: one record is enough
            return
        self._file.write(record)


class _Interruption:
    """The first Ctrl-C asks to finish what is begun; the second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        # Only the main thread can receive signals, and whoever has them ignored (nohup) wants that kept.
        is_main = threading.current_thread() is threading.main_thread()
        self._is_heard = is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def __enter__(self) -> Self:
        if self._is_heard:
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_heard:
            signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not print: it may be in the middle of a line itself
            os.write(2, b"\nfinishing the pictures that are begun; Ctrl-C again stops at once\n")


class _Progress:
    """One line on the terminal, written over and over."""

    _INTERVAL_S = 0.2

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible
        self._started = self._shown_at = time.perf_counter()
        self._is_shown = False

    def show(self, tally: Tally) -> None:
        now = time.perf_counter()
        if not self._visible or now - self._shown_at < self._INTERVAL_S:
            return
        self._shown_at = now
        self._is_shown = True
        rate = tally.num_pictures / (now - self._started)
        failed = f", {tally.num_failed} failed" if tally.num_failed else ""
        line = f"{tally.num_pictures} answered{failed}, {rate:.1f} pictures/s"
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Free the line for other talk."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False


def _print(record: Record, *, as_text: bool) -> None:
    """One record on stdout, at once: whoever reads the pipe need not wait for the rest."""
    if as_text:
        if record["error"] is not None:
            return  # was told on stderr
        line = text_line(record)
    else:
        line = record_to_line(record)
    # Bytes, since a terminal's or pipe's encoding must not decide whether an answer can be written.
    sys.stdout.flush()
    sys.stdout.buffer.write(line.encode(errors="backslashreplace") + b"\n")
    sys.stdout.buffer.flush()


def text_line(record: Record) -> str:
    """An answer for a person: one line, whatever the model wrote."""
    text = one_line(record["text"])
    probability = (record["choice"] or {}).get(record["text"])
    said = text if probability is None else f"{text} ({probability:.2f})"
    return f"{record['picture']}: {said}"


def one_line(text: str) -> str:
    """What a model wrote, fit for one line of a terminal: a space for every character that is not printed."""
    return "".join(character if character.isprintable() else " " for character in text)


def _settings(job: Job, captioner: Captioner) -> dict[str, Any]:
    """What an answer depends on beside picture, prompt and model."""
    return record_settings(
        captioner.spec,
        info=captioner.info,
        sampling=job.sampling,
        choices=job.question.choices,
        form=job.question.form,
        input=job.question.input,
    )


def _resolved(captioner: Captioner) -> dict[str, Any]:
    """The spec with nothing left open."""
    info = captioner.info
    return {
        **dataclasses.asdict(captioner.spec),
        "name": info.name,
        "device": info.device,
        "dtype": info.dtype,
        "operators": info.operators,
        "context": info.context,
    }


def _file_digest(path: str) -> str | None:
    """As `vision.image` computes it; None for what is no readable file."""
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return None


def is_sample(path: str) -> bool:
    """Whether a picture is one of those that the embedded model comes with."""
    try:
        return Path(path).resolve().is_relative_to(sample_pictures().resolve())
    except (OSError, ValueError):
        return False


def _count(number: int, done: str) -> str:
    return f"{number} picture{'' if number == 1 else 's'} {done}"
