"""Collects calibration samples, which the model answers, and writes a bundle that is rounded for their inputs."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from torch import Tensor

from llama_adapter.app.captioning.captioner import Answer, Captioner, WorkItem, WorkQuestion
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.questions import fill, picture_variables
from llama_adapter.app.learning.quantising.rounding import Sample, round_model
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec, PictureInput, read_inputs
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader
from llama_adapter.app.pictures.reading.spec import ReaderKind
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.stderr_lines import say, say_count
from llama_adapter.vision.config import VisionConfig

LEAST_PICTURES = 8
MOST_PICTURES = 512  # limited because all activations are in memory together
FEW_PICTURES = 128  # the number of sequences in the paper


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """The sources of calibration samples."""

    pictures: tuple[str, ...]  # files, folders, patterns and tar archives
    questions: tuple[Question, ...] = (Question(),)  # each picture gets one of them, in turn
    reader: ReaderKind = "process"


def collect_samples(spec: SampleSpec, *, model: str | None, vision: VisionConfig) -> list[Sample]:
    """The samples for a bundle whose encoder is `vision`, answered greedily on the CPU.

    Pictures without an answer are skipped with a note. Raises UsageError for fewer than `LEAST_PICTURES` pictures; if
    too few can be read, before the model is loaded. Raises the errors of loading the model.
    """
    captioner_spec = CaptionerSpec(model=model, device="cpu", channel_order=vision.channel_order)
    inputs = list(islice(read_inputs(InputSpec(paths=spec.pictures)), MOST_PICTURES + 1))
    if len(inputs) > MOST_PICTURES:
        say(f"note: the first {MOST_PICTURES} pictures are used")
    with closing(open_reader(spec.reader, captioner_spec.pictures, pixels=vision.clip.pixels)) as reader:
        readings = [(one, _read(one, reader)) for one in inputs[:MOST_PICTURES]]
    read = [(one, reading) for one, reading in readings if reading is not None]
    _check_number(len(read))
    with Captioner.from_spec(captioner_spec) as captioner:
        samples = list(_answered(read, spec.questions, captioner))
    _check_number(len(samples))
    if len(samples) < FEW_PICTURES:
        say(f"note: {len(samples)} pictures are few; {FEW_PICTURES} or more give better weights")
    return samples


def _read(one: PictureInput, reader: Reader) -> PictureReading | None:
    """Read a picture; for a picture that cannot be read, print a note and return None."""
    error, reading = one.error, None
    if error is None:
        assert one.source is not None, "only pictures are named"
        reading = reader.read(one.source, name=one.label)
        error = reading.error
    if error is None:
        return reading
    say(f"note: a picture is skipped: {error.message}")
    return None


def _answered(
    read: Sequence[tuple[PictureInput, PictureReading]], questions: Sequence[Question], captioner: Captioner
) -> Iterator[Sample]:
    items = []
    for index, (one, reading) in enumerate(read):
        question = fill(questions[index % len(questions)], picture_variables(one.label, one.columns))
        prompt = question.prompt(captioner.info.default_prompt)
        captioner.encode_prompt(prompt, question.task)  # raises before any work is done
        asked = WorkQuestion(index=index, prompt=prompt, task=question.task)
        items.append(WorkItem(picture=reading, label=one.label, questions=(asked,)))
    answers = [event for event in captioner.run(items, sampling=SamplingParams()) if isinstance(event, Answer)]
    for answer in sorted(answers, key=lambda answer: answer.index):
        if answer.error is not None:
            say(f"note: `{answer.picture}` is skipped: {answer.error.message}")
            continue
        asked = items[answer.index].questions[0]
        prompt_ids = captioner.encode_prompt(asked.prompt, asked.task).token_ids
        pixels = read[answer.index][1].pixels
        assert pixels is not None, "an encoder of this process reads pixels"
        yield Sample(pixels=pixels, token_ids=(*prompt_ids, *answer.token_ids), num_prompt_tokens=len(prompt_ids))


def _check_number(found: int) -> None:
    if found < LEAST_PICTURES:
        raise UsageError(
            f"--calibrate needs at least {LEAST_PICTURES} pictures that can be read and answered, got {found}",
            hint="name a folder with a few hundred pictures like those of the job",
        )


def quantise_calibrated(job: QuantiseJob, samples: SampleSpec) -> Path:
    """As `quantise_bundle`, but rounded for the samples. Raises its errors and those of `collect_samples`."""
    bundle = None if job.model is None else os.path.abspath(job.model)  # a path, not a name to search for

    def round_weights(model: LoadedModel) -> tuple[LoadedModel, Iterator[tuple[str, Tensor]]]:
        if not model.vision_state:
            raise UsageError(f"--calibrate takes pictures, and `{model.name}` is a model for texts")
        started = time.perf_counter()
        found = collect_samples(samples, model=bundle, vision=model.vision_config)
        num_tokens, elapsed_s = sum(len(sample.token_ids) for sample in found), time.perf_counter() - started
        say(f"calibrating with {len(found)} pictures and {num_tokens:,} tokens, answered in {elapsed_s:,.0f} s")
        return round_model(
            model, found, dtype=model.dtype, precision=job.precision, progress=partial(say_count, what="layers rounded")
        )

    return quantise_bundle(job, round_weights=round_weights)
