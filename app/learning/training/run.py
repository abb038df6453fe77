"""`train` from start to end: checks the data, encodes the pictures, trains an adapter and writes the results."""

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from llama_adapter.app.jobs.interruption import Interruption, interruptible
from llama_adapter.app.learning.scores.scoring import Scores
from llama_adapter.app.learning.training import checkpoint, results
from llama_adapter.app.learning.training.asking import Asker, learned_questions
from llama_adapter.app.learning.training.batches import Feeder
from llama_adapter.app.learning.training.checkpoint import BEST, LAST
from llama_adapter.app.learning.training.encoding import encode_all
from llama_adapter.app.learning.training.eye import EYE, Eye, is_small, num_epochs
from llama_adapter.app.learning.training.familiarity import familiarity_of
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.loop import Ended, Loop, TrainProgress
from llama_adapter.app.learning.training.model import TrainableModel, open_trainable
from llama_adapter.app.learning.training.plan import StepPlan, plan_step, require_memory, smaller
from llama_adapter.app.learning.training.planning import shapes_of, sizes_of
from llama_adapter.app.learning.training.prepare import TrainingData, prepare, read_data, run_digest
from llama_adapter.app.learning.training.ranks import Distributed, Kind, OneRank, device_name, meet, num_ranks_here
from llama_adapter.app.learning.training.scoring import (
    HEADLINES,
    MOST_COMPARED,
    Validator,
    captioner_of,
    drawn,
    num_compared,
    shown_test,
)
from llama_adapter.app.learning.training.targets import targets_of
from llama_adapter.app.learning.training.yardstick import yardstick_of
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import DEFAULT_CONTEXT
from llama_adapter.app.models.llama_folder import find_llama
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.parallel.launch import launched
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import stored_questions, training_template
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.runtime.atomic_write import require_place
from llama_adapter.runtime.devices import Backend, open_backend, resolve_dtype
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError
from llama_adapter.runtime.host_memory import statistic
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.partial import remove_leftovers
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import counted, shown_name, shown_text

_STATUS: Final = Path("/proc/self/status")
_INTERRUPTED: Final = "the run was interrupted."
_MOST_TEST_COMPARED: Final = 10 * MOST_COMPARED
_SCORED_BYTES: Final = 2 << 30  # frozen weights. Larger models load too slowly to be scored during a run


def train(job: TrainJob) -> int:
    """Run the job; returns the exit code. Raises the errors that runtime/problems.py lists.

    Errors in the data are raised before the model is loaded. Only one run at a time writes to `job.out`; its first rank
    holds the lock.
    """
    place = launched()
    if place is not None and place.rank > 0:
        return _run(job)
    with locked_output(job.out):
        return _run(job)


def _run(job: TrainJob) -> int:
    _check_places(job)
    for place in (job.folder, job.folder.parent):  # they may take the space that is needed
        remove_leftovers(place)
    tokenizer, context, prompt = model_texts(job.spec)
    asker = Asker(tokenizer, default_prompt=prompt, template=training_template(job.spec))
    found = read_data(job)
    data = prepare(job, found, asker=asker, context=context)
    backend = open_backend(device_name(job.spec.device))
    ranks = meet(backend=backend, timeout_s=job.timeout_s)
    with contextlib.closing(ranks):
        return _Training(job, data=data, backend=backend, ranks=ranks).run()


def model_texts(spec: CaptionerSpec) -> tuple[Tokenizer, int, str]:
    """Tokenizer, context and caption prompt of the model of a spec; loads no weights. Raises CheckpointError."""
    prompt = stored_questions(spec).of_captions.prompt
    if spec.llama_dir is not None:
        place = find_llama(spec.llama_dir, llama_type=spec.llama_type)
        return place.open_tokenizer(), spec.context or DEFAULT_CONTEXT, prompt
    bundle = bundle_folder(spec.model)
    manifest = read_manifest(bundle)
    _, decoder = manifest.configs(context=spec.context)
    return Tokenizer.load_stored(bundle, manifest["files"]), decoder.context, prompt


def _check_places(job: TrainJob) -> None:
    """Raise UsageError if the job would replace earlier results unasked, and OSError if it cannot write its own."""
    out, folder = Path(job.out), job.folder
    if out.is_dir() or (folder.exists() and not folder.is_dir()):
        wanted, got, place = ("file", "folder", out) if out.is_dir() else ("folder", "file", folder)
        raise UsageError(f"Wanted to write a {wanted} `{place}`, and a {got} is there", hint="name another --out")
    has_checkpoint = (folder / LAST).is_file() or (folder / EYE).is_file()
    if job.resume and not has_checkpoint:
        raise UsageError(
            f"--resume goes on from `{folder / LAST}`, which does not exist", hint="leave --resume out to begin"
        )
    there = next((path for path in (folder / LAST, folder / EYE, out) if path.exists()), None)
    if there is not None and not job.resume and not job.force:
        raise UsageError(
            f"`{there}` exists already",
            hint="go on with that run with --resume, replace it with --force, or name another --out",
        )
    require_place(out)


def run_dtype(job: TrainJob, backend: Backend, *, device_type: str) -> torch.dtype:
    """The dtype of frozen weights: float32 on a CPU, elsewhere bfloat16 if the device computes in it.

    The device of a plan may be another than this one. Raises DeviceError if the job names a dtype that `backend` lacks.
    """
    name = job.spec.dtype
    if name == AUTO:
        is_half = device_type != "cpu" and "bfloat16" in backend.capabilities.dtypes
        name = "bfloat16" if is_half else "float32"
    return resolve_dtype(name, backend=backend)


class _Planned(NamedTuple):
    """The plan of this rank."""

    plan: StepPlan
    rows: int  # that this rank computes at once
    is_scored: bool  # whether answers are scored during the run
    kernels: Library | None  # if there is memory for them


class _Training:
    """A run on this rank: making it opens the model and encodes the pictures, `run` trains and writes the results."""

    def __init__(self, job: TrainJob, *, data: TrainingData, backend: Backend, ranks: OneRank) -> None:
        self._backend, self._ranks = backend, ranks
        self._dtype = run_dtype(job, backend, device_type=backend.device.type)
        self._kind: Kind = "one" if ranks.size == 1 else job.parallel
        self._sizes = sizes_of(job)
        self._seeing: dict[str, torch.Tensor] | None = None  # a trained encoder, if parameters are divided afterwards
        targets = targets_of(data.train) if is_small(self._sizes.vision) else None
        job = job.with_sets(learns_tower=targets is not None).with_rate(width=self._sizes.decoder.dim)
        decoder_kinds = job.choice.kinds - {"picture tower", "visual blocks"}  # they learn after the encoder
        has_eye = "picture tower" in job.choice.kinds and bool(decoder_kinds) and num_epochs(job, len(data.train)) > 0
        plain = job
        self._job = job = job.with_trained_eye() if has_eye and targets and targets.are_classes else job
        self._began = run_digest(job, data)  # before pictures were decoded
        if job.resume:
            results.require_same_run(job.folder, self._began)
        self._planned = self._plan(data)
        if job.resume and (job.folder / LAST).is_file():
            results.require_same_measure(
                job, checkpoint.read_checkpoint(job.folder / LAST)[1], is_scored=self._planned.is_scored
            )
        predicted = self._planned.plan.total / 1e9
        self._tell(f"predicted peak memory: {predicted:.2f} GB{' of each device' if ranks.size > 1 else ''}")
        self._peak = _PeakMemory(backend.device)
        self._model = self._open(backend.device, kernels=self._planned.kernels)
        backend.empty_caches()
        self._model.decoder.checkpoint_layers = job.checkpointing
        if ranks.is_first:
            results.require_target(job, self._model)
        for note in self._model.notes:
            self._tell(f"note: {note}")
        if data.warnings:
            self._tell(f"note: the data have these faults:\n{data.warnings}")
        if num_known := results.num_known(job, self._model, data):
            what = f"{counted(num_known, 'picture')} that the model has learned before, so its scores are too high"
            self._tell(f"note: the test has {what}: name the splits of the earlier run in a column `split`")
        with terminated_as_interrupted():
            self._encodings, self._unreadable = encode_all(job, self._model, data, ranks=ranks)
        self._data = data.without({one.digest for one in self._unreadable if one.digest})
        self._targets = targets_of(self._data.train) if has_eye and targets else None
        if self._targets is None or not self._targets.are_classes:  # too few pictures are left
            self._job = plain
        self._yardstick = yardstick_of(self._model, self._data, self._encodings) if ranks.is_first else None
        for line in self._yardstick.lines() if self._yardstick is not None else ():
            self._tell(line)

    def run(self) -> int:
        """Train on the data and write the results; returns the exit code."""
        model, ranks = self._model, self._ranks
        note = "ending after this step; interrupt again to end at once" if ranks.is_first else ""
        with interruptible(note) as interruption:
            if not self._train_eye(interruption):
                return ExitCode.INTERRUPTED
            if self._kind == "fsdp" and model.is_eye_trained and model.vision is not None:
                self._seeing = {name: tensor.cpu().clone() for name, tensor in model.vision.state_dict().items()}
            distributed = Distributed(model, kind=self._kind, ranks=ranks)
            self._announce()
            ended = self._loop(distributed, interruption)
            is_whole = ended.why != "interrupted"
            if ranks.is_first:
                is_whole &= self._write(ended, interruption)
            ranks.wait()  # until the files are written
        if not is_whole:
            return ExitCode.INTERRUPTED
        return ExitCode.PICTURE_ERRORS if self._unreadable else ExitCode.OK

    def _tell(self, text: str) -> None:
        if self._ranks.is_first:
            say(text)

    def _open(self, device: torch.device | str, *, kernels: Library | None = None) -> TrainableModel:
        job = self._job
        return open_trainable(job.spec, job.choice, dtype=self._dtype, device=device, seed=job.seed, kernels=kernels)

    def _train_eye(self, interruption: Interruption) -> bool:
        """Train a small encoder, if it has something to learn; returns False if it was asked to end before."""
        job, ranks, data, targets = self._job, self._ranks, self._data, self._targets
        if targets is None:
            return True
        if ranks.is_first:
            if not job.resume:  # a run that is replaced must not be continued after this one is interrupted
                for name in (EYE, LAST, BEST):
                    (job.folder / name).unlink(missing_ok=True)
            results.write_beginning(job, data, run=self._began)
        digest = run_digest(job, data, model=self._model.start_digest)
        eye = Eye(self._model, targets, encodings=self._encodings, job=job, run=digest, ranks=ranks)
        if job.resume:
            eye.resume()
        progress = TrainProgress(visible=ranks.is_first and not job.quiet, num_steps=eye.num_steps, every=None)
        self._tell(f"training the encoder: {eye.num_steps:,} steps")
        if not eye.train(progress, is_asked_to_end=lambda: interruption.is_asked):
            self._tell("interrupted while the encoder is trained; --resume goes on from here")
            return False
        if data.validation and (right := eye.are_right(data.validation)):
            share, what = sum(right) / len(right), counted(len(right), "validation example")
            self._tell(f"the encoder alone answers {share * 100:.1f} % of {what} with given answers")
        self._encodings = eye.finished(data)
        return True

    def _plan(self, data: TrainingData) -> _Planned:
        """Raises TooLittleMemoryError."""
        job, backend, is_divided = self._job, self._backend, self._kind == "fsdp"
        shapes = shapes_of(
            job,
            self._sizes,
            dtype=self._dtype,
            device_type=backend.device.type,
            tokens=data.longest,
            labels=max(len(row.labels) for one in data.everything for row in one.rows),
        )
        step_size, num_ranks = job.optimisation.step_size(len(data.train)), self._ranks.size
        own = smaller(shapes, num_ranks=num_ranks, batch_size=step_size, rows=job.optimisation.rows)
        plan = plan_step(own, num_ranks=num_ranks, kind=job.parallel)
        is_scored = job.score == "answers" or (
            job.score == "auto"
            and not is_divided
            and plan.frozen <= _SCORED_BYTES
            and bool(data.validation)
            and num_compared(drawn(data.validation)) <= MOST_COMPARED
        )
        if not is_scored:
            plan = dataclasses.replace(plan, scoring=0)
        free = backend.free_bytes()
        if free is not None and backend.device.type == "cpu":
            free //= num_ranks_here()
        kernels = None if is_divided else find_kernels(backend.device.type, self._dtype)
        packed = plan.packed()
        if kernels is not None and (free is None or packed.total <= free):
            return _Planned(packed, own.rows, is_scored, kernels)
        require_memory(plan, free=free, device=backend.name)
        return _Planned(plan, own.rows, is_scored, None)

    def _announce(self) -> None:
        job, data, counts = self._job, self._data, self._model.counts()
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
        self._tell(f"trained: {sum(counts.values()):,} numbers ({kinds})")
        num_steps = job.optimisation.num_steps(len(data.train))
        each = -(-len(data.train) // job.optimisation.batch_size)
        self._tell(
            f"examples: {len(data.train):,} to learn, {len(data.validation):,} for validation, {len(data.test):,} for "
            f"the test; {num_steps:,} steps of {job.optimisation.step_size(len(data.train)):,} (epochs: "
            f"{num_steps / each:.4g}), highest learning rate {job.lr:g}"
        )
        if (few := data.few_of_classes()) is not None:
            self._tell(f"note: {few}")
        compared = num_compared(drawn(data.validation))
        if job.score != "loss" and compared > MOST_COMPARED:
            way = "which takes long; --score loss is faster" if job.score == "answers" else "so the loss alone decides"
            self._tell(f"note: the validation examples have {compared:,} choices to compare in each evaluation, {way}")
        if not data.validation:
            self._tell(
                "note: no examples are for validation, so the last weights are taken and the run does not end early"
            )

    def _loop(self, distributed: Distributed, interruption: Interruption) -> Ended:
        job, ranks, data, encodings = self._job, self._ranks, self._data, self._encodings
        step_size = job.optimisation.step_size(len(data.train))
        # Fewer examples are left if pictures are unreadable.
        rows = min(self._planned.rows, -(-step_size // ranks.size))
        validator = None
        if data.validation:
            opens = partial(captioner_of, distributed.model, job.spec) if self._planned.is_scored else None
            validator = Validator(
                distributed, data.validation, encodings=encodings, rows=rows, ranks=ranks, open_captioner=opens
            )
        feeder = Feeder(job, data.train, encodings=encodings, rows=rows, ranks=ranks)
        with contextlib.closing(feeder):
            loop = Loop(
                distributed,
                job=job,
                run=run_digest(job, data, model=self._model.start_digest),
                feeder=feeder,
                validate=validator,
                ranks=ranks,
                interruption=interruption,
            )
            if job.resume and (job.folder / LAST).is_file():
                loop.resume()
            if ranks.is_first:  # after `resume`, which refuses the folder of another run
                results.write_beginning(job, data, run=self._began)
            return loop.run()

    def _write(self, ended: Ended, interruption: Interruption) -> bool:
        """Write all results; returns whether the scoring was not interrupted."""
        job, model, data, yardstick = self._job, self._model, self._data, self._yardstick
        best, measured = job.folder / BEST, self._peak.read()
        memory = f"predicted {self._planned.plan.total / 1e9:.2f} GB"
        memory += "" if measured is None else f", measured {measured / 1e9:.2f} GB"
        if self._kind == "fsdp":  # parameters are divided, but the adapter is written from whole ones
            model = self._open("cpu")
            if self._seeing is not None and model.vision is not None:
                model.vision.load_state_dict(self._seeing)
                model.freeze_vision()
        own = model.trained()
        tensors, _ = checkpoint.read_checkpoint(best)
        checkpoint.check_tensors(tensors, checkpoint.weight_shapes(own), path=best)
        with torch.no_grad():
            for name, tensor in checkpoint.weights_of(tensors).items():
                own[name].copy_(tensor)
        model.questions = learned_questions(data.train, base=model.questions)
        bundle = results.write_model(job, model, detector=familiarity_of(model, data, self._encodings))
        say(f"wrote `{shown_name(job.out)}`" + ("" if bundle is None else f" and `{shown_name(str(bundle))}`"))
        if ended.state.best and ended.state.best_step == 0 < ended.state.step:
            say(
                "note: no evaluation was better than the one before the first step, so these are the weights that the "
                "training began with; more --epochs or another --lr may help"
            )
        spec = results.trained_spec(job, model)
        if self._kind != "fsdp":
            model.release()  # the captioner needs this memory
        scores, unscored = self._test_scores(spec, ended, interruption)
        judged = [one for one in scores if yardstick is not None and one.task == yardstick.task]
        figure = judged[0].figures[HEADLINES[judged[0].task]] if judged else None
        usual = judged[0].classes.get(yardstick.answer) if judged and yardstick else None
        num_usual, has_eye = usual["recall"].count if usual else 0, self._targets is not None
        verdict = yardstick.verdict(figure, num_usual=num_usual, has_eye=has_eye) if figure and yardstick else None
        results.draw(job)
        results.write_card(
            job,
            model,
            data,
            ended=ended,
            unreadable=self._unreadable,
            scores=scores,
            unscored=unscored,
            memory=memory,
            yardstick=yardstick,
            verdict=verdict,
            bundle=bundle,
        )
        if verdict is not None:
            say(f"warning: {verdict}")
        for one in scores:
            say(shown_test(one))
            if one.hint is not None:
                say(f"note: {one.hint}")
        scoring = results.score_command(job, data, bundle=bundle)
        if not scores and scoring is not None:
            say(f"note: the test examples are not scored: {unscored} Score them:\n{shown_text(scoring)}")
        asking = shown_text(results.ask_command(job, data, bundle=bundle))
        say(f"`{shown_name(str(job.folder / results.CARD))}` has all figures, and more commands. Ask it:\n{asking}")
        return unscored != _INTERRUPTED

    def _test_scores(self, spec: CaptionerSpec, ended: Ended, interruption: Interruption) -> tuple[list[Scores], str]:
        """Scores of the test examples, or none and the reason. Errors are not raised: the adapter is written."""
        data = self._data
        if not data.test:
            return [], "there are none."
        if ended.why == "interrupted" or interruption.is_asked:
            return [], _INTERRUPTED
        compared = num_compared(data.test)
        if compared > _MOST_TEST_COMPARED:
            return [], f"they have {compared:,} choices to compare, which takes long."
        if not self._job.quiet:
            say(f"scoring {counted(len(data.test), 'test example')}")
        try:
            with interruption.raised():
                return results.score_test(self._job, spec, data), ""
        except KeyboardInterrupt:
            return [], _INTERRUPTED
        except (LlamaAdapterError, RuntimeError, OSError) as error:
            return [], f"{describe(error).sentence.rstrip('.')}."


class _PeakMemory:
    """The peak since this object was made: of the device's allocator, or on a CPU of the process."""

    def __init__(self, device: torch.device) -> None:
        self._allocator: Any = None
        if device.type != "cpu":
            self._allocator = torch.get_device_module(device)
            self._allocator.reset_peak_memory_stats(device)
        self._device, self._before = device, statistic(_STATUS, "VmRSS:")

    def read(self) -> int | None:
        """The peak in bytes; None if the system does not report it."""
        if self._allocator is not None:
            return int(self._allocator.max_memory_allocated(self._device))
        peak = statistic(_STATUS, "VmHWM:")
        return None if peak is None or self._before is None else (peak - self._before) * 1024
