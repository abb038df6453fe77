"""`train` from start to end: checks the data, encodes the pictures, trains an adapter and writes the results."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch

from llama_adapter.app.learning.scores.scoring import Scores
from llama_adapter.app.learning.training.asking import Asker, learned_questions
from llama_adapter.app.learning.training.batches import BatchOrder
from llama_adapter.app.learning.training.cache import Unreadable
from llama_adapter.app.learning.training.checkpoint import (
    BEST,
    LAST,
    check_tensors,
    read_checkpoint,
    weight_shapes,
    weights_of,
)
from llama_adapter.app.learning.training.commands import ask_command, score_command
from llama_adapter.app.learning.training.distributing import Distributed, Kind
from llama_adapter.app.learning.training.encoding import encode_all
from llama_adapter.app.learning.training.feeding import Encodings, Feeder
from llama_adapter.app.learning.training.interrupting import Interruption, interruptible
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.loop import Ended, Loop
from llama_adapter.app.learning.training.model import TrainableModel, open_trainable
from llama_adapter.app.learning.training.peak import PeakMemory
from llama_adapter.app.learning.training.plan import StepPlan, plan_step, require_memory, smaller
from llama_adapter.app.learning.training.planning import shapes_of, sizes_of
from llama_adapter.app.learning.training.prepare import TrainingData, prepare, read_data, run_digest
from llama_adapter.app.learning.training.progress import TrainProgress
from llama_adapter.app.learning.training.ranks import OneRank, device_name, meet, num_ranks_here
from llama_adapter.app.learning.training.results import (
    CARD,
    draw,
    require_disk,
    require_same_measure,
    require_same_run,
    score_test,
    trained_spec,
    write_beginning,
    write_card,
    write_model,
)
from llama_adapter.app.learning.training.scoring import (
    HEADLINES,
    MOST_COMPARED,
    MOST_SCORED,
    Validator,
    captioner_of,
    num_compared,
)
from llama_adapter.app.models.bundle_manifest import TOKENIZER, read_configs, read_manifest
from llama_adapter.app.models.checkpoints import DEFAULT_CONTEXT, find_llama
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.parallel.launch import launched
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import stored_questions
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.training.frozen import find_kernels
from llama_adapter.runtime.devices import Backend, open_backend, resolve_dtype
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError, UsageError
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.locking import locked_output
from llama_adapter.runtime.partial import remove_leftovers
from llama_adapter.runtime.problems import describe
from llama_adapter.runtime.terminal.run_guarded import terminated_as_interrupted
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_name, shown_text

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
    folder = _folder(job)
    for place in (folder, folder.parent):  # they may take the space that is needed
        remove_leftovers(place)
    tokenizer, context, prompt = model_texts(job.spec)
    found = read_data(job)
    data = prepare(job, found, asker=Asker(tokenizer, default_prompt=prompt), context=context)
    backend = open_backend(device_name(job.spec.device))
    ranks = meet(backend=backend, timeout_s=job.timeout_s)
    with contextlib.closing(ranks):
        return _train(job, data, folder, backend=backend, ranks=ranks)


def model_texts(spec: CaptionerSpec) -> tuple[Tokenizer, int, str]:
    """Tokenizer, context and caption prompt of the model of a spec; loads no weights. Raises CheckpointError."""
    if spec.llama_dir is not None:
        place = find_llama(spec.llama_dir, llama_type=spec.llama_type)
        prompt = stored_questions(spec).prompt
        return Tokenizer.load(place.require_tokenizer()), spec.context or DEFAULT_CONTEXT, prompt
    bundle = bundle_folder(spec.model)
    manifest = read_manifest(bundle)
    _, decoder = read_configs(bundle, manifest)
    return Tokenizer.load(bundle / TOKENIZER), spec.context or decoder.context, str(manifest["prompt"])


def _folder(job: TrainJob) -> Path:
    """The run's folder, next to the adapter's file.

    Raises UsageError if it has results of an earlier run, unless the job resumes or replaces them.
    """
    out = Path(job.out)
    if not out.absolute().parent.is_dir():
        raise UsageError(f"The folder of `{job.out}` does not exist", hint="make it first")
    folder = job.folder
    if out.is_dir() or (folder.exists() and not folder.is_dir()):
        wanted, got, place = ("file", "folder", out) if out.is_dir() else ("folder", "file", folder)
        raise UsageError(f"Wanted to write a {wanted} `{place}`, and a {got} is there", hint="name another --out")
    if not os.access(out.absolute().parent, os.W_OK):
        raise UsageError(f"The folder of `{job.out}` cannot be written to", hint="name another --out")
    has_checkpoint = (folder / LAST).is_file()
    if job.resume and not has_checkpoint:
        raise UsageError(
            f"--resume goes on from `{folder / LAST}`, which does not exist", hint="leave --resume out to begin"
        )
    there = next((path for path in (folder / LAST, out) if path.exists()), None)
    if there is not None and not job.resume and not job.force:
        raise UsageError(
            f"`{there}` exists already",
            hint="go on with that run with --resume, replace it with --force, or name another --out",
        )
    return folder


def _train(job: TrainJob, data: TrainingData, folder: Path, *, backend: Backend, ranks: OneRank) -> int:
    tell = say if ranks.is_first else _nothing
    dtype, kind = run_dtype(job, backend), _kind(job, ranks)
    job = job.with_rate(width=sizes_of(job).decoder.dim)
    run = run_digest(job, data)
    if job.resume:
        require_same_run(folder, run)
    plan, is_scored, kernels = _planned(job, data, backend=backend, dtype=dtype, kind=kind, ranks=ranks)
    if job.resume:
        require_same_measure(read_checkpoint(folder / LAST)[1], is_scored=is_scored, folder=folder)
    tell(f"predicted peak memory: {plan.total / 1e9:.2f} GB{' of each device' if ranks.size > 1 else ''}")
    peak = PeakMemory(backend.device)
    model = open_trainable(job.spec, job.choice, dtype=dtype, device=backend.device, seed=job.seed, kernels=kernels)
    backend.empty_caches()
    model.checkpoint_layers = job.checkpointing
    if ranks.is_first:
        require_disk(job, model, folder)
    for note in model.notes:
        tell(f"note: {note}")
    if data.warnings:
        tell(f"note: the data have these faults:\n{data.warnings}")
    with terminated_as_interrupted():
        encodings, unreadable = encode_all(job, model, data, ranks=ranks)
    data = data.without({one.digest for one in unreadable if one.digest})
    distributed = Distributed(model, kind=kind, ranks=ranks)
    num_steps = job.optimisation.num_steps(len(data.train))
    _announce(job, model, data, num_steps=num_steps, tell=tell)
    with interruptible(speaks=ranks.is_first) as interruption:
        ended = _run_loop(
            job,
            distributed,
            data,
            folder,
            run=run,
            encodings=encodings,
            num_steps=num_steps,
            is_scored=is_scored,
            ranks=ranks,
            interruption=interruption,
        )
        is_whole = _write(
            job,
            model,
            data,
            folder,
            ended=ended,
            unreadable=unreadable,
            memory=_shown_memory(plan, peak.read()),
            kind=kind,
            ranks=ranks,
            interruption=interruption,
        )
    if not is_whole:
        return ExitCode.INTERRUPTED
    return ExitCode.PICTURE_ERRORS if unreadable else ExitCode.OK


def _nothing(text: str) -> None:
    pass


def run_dtype(job: TrainJob, backend: Backend) -> torch.dtype:
    """The dtype of frozen weights: float32 on a CPU, elsewhere bfloat16 if the device computes in it.

    Raises DeviceError if the job names a dtype that the device lacks.
    """
    name = job.spec.dtype
    if name == AUTO:
        is_half = backend.device.type != "cpu" and "bfloat16" in backend.capabilities.dtypes
        name = "bfloat16" if is_half else "float32"
    return resolve_dtype(name, backend=backend)


def _planned(
    job: TrainJob, data: TrainingData, *, backend: Backend, dtype: torch.dtype, kind: Kind, ranks: OneRank
) -> tuple[StepPlan, bool, Library | None]:
    """The plan of this rank, whether answers are scored during the run, and the kernels if there is memory for them.

    Raises TooLittleMemoryError.
    """
    sizes = sizes_of(job)
    shapes = shapes_of(
        job,
        decoder=sizes.decoder,
        vision=sizes.vision,
        dtype=dtype,
        device_type=backend.device.type,
        tokens=data.longest,
        labels=max(row.num_labels for one in data.everything for row in one.rows),
        is_scored=True,
    )
    step_size = job.optimisation.step_size(len(data.train))
    own = smaller(shapes, num_ranks=ranks.size, batch_size=step_size, rows=job.optimisation.rows)
    plan = plan_step(own, num_ranks=ranks.size, kind="fsdp" if kind == "fsdp" else "ddp")
    is_scored = job.score == "answers" or (
        job.score == "auto"
        and kind != "fsdp"
        and plan.frozen <= _SCORED_BYTES
        and bool(data.validation)
        and num_compared(data.validation[:MOST_SCORED]) <= MOST_COMPARED
    )
    if not is_scored:
        plan = dataclasses.replace(plan, scoring=0)
    free = backend.free_bytes()
    if free is not None and backend.device.type == "cpu":
        free //= num_ranks_here()
    kernels = None if kind == "fsdp" else find_kernels(backend.device.type, dtype)
    packed = plan.packed()
    if kernels is not None and (free is None or packed.total <= free):
        return packed, is_scored, kernels
    require_memory(plan, free=free, device=backend.name)
    return plan, is_scored, None


def _shown_memory(plan: StepPlan, measured: int | None) -> str:
    found = "" if measured is None else f", measured {measured / 1e9:.2f} GB"
    return f"predicted {plan.total / 1e9:.2f} GB{found}"


def _kind(job: TrainJob, ranks: OneRank) -> Kind:
    if ranks.size == 1:
        return "one"
    return "fsdp" if job.parallel == "fsdp" else "ddp"


def _announce(
    job: TrainJob, model: TrainableModel, data: TrainingData, *, num_steps: int, tell: Callable[[str], None]
) -> None:
    counts = model.counts()
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
    tell(f"trained: {sum(counts.values()):,} numbers ({kinds})")
    each = -(-len(data.train) // job.optimisation.batch_size)
    tell(
        f"examples: {len(data.train):,} to learn, {len(data.validation):,} for validation, {len(data.test):,} for the "
        f"test; {num_steps:,} steps of {job.optimisation.step_size(len(data.train)):,}, {num_steps / each:.4g} "
        f"epochs, highest learning rate {job.lr:g}"
    )
    compared = num_compared(data.validation[:MOST_SCORED])
    if job.score != "loss" and compared > MOST_COMPARED:
        way = "which takes long; --score loss is faster" if job.score == "answers" else "so the loss alone decides"
        tell(f"note: the validation examples have {compared:,} choices to compare in each evaluation, {way}")
    if not data.validation:
        tell("note: no examples are for validation, so the last weights are taken and the run does not end early")


def _run_loop(
    job: TrainJob,
    distributed: Distributed,
    data: TrainingData,
    folder: Path,
    *,
    run: str,
    encodings: Encodings,
    num_steps: int,
    is_scored: bool,
    ranks: OneRank,
    interruption: Interruption,
) -> Ended:
    model, optimisation = distributed.model, job.optimisation
    order = BatchOrder([one.num_tokens for one in data.train], batch_size=optimisation.batch_size, seed=job.seed)
    own = -(-optimisation.step_size(len(data.train)) // ranks.size)
    rows = min(own, optimisation.rows or own)
    validator = None
    if data.validation:
        opens = partial(captioner_of, model, job.spec) if is_scored else None
        validator = Validator(
            distributed, data.validation, encodings=encodings, rows=rows, ranks=ranks, open_captioner=opens
        )
    feeder = Feeder(
        data.train, order=order, encodings=encodings, rows=rows, seed=job.seed, ranks=ranks, num_steps=num_steps
    )
    with contextlib.closing(feeder):
        loop = Loop(
            distributed,
            job=job,
            folder=folder,
            run=run_digest(job, data),
            feeder=feeder,
            steps_per_epoch=order.steps_per_epoch,
            num_steps=num_steps,
            validate=validator,
            ranks=ranks,
            progress=TrainProgress(visible=ranks.is_first and not job.quiet, num_steps=num_steps),
            interruption=interruption,
        )
        if job.resume:
            loop.resume()
        if ranks.is_first:  # after `resume`, which refuses the folder of another run
            write_beginning(job, data, folder, run=run)
        return loop.run()


def _write(
    job: TrainJob,
    model: TrainableModel,
    data: TrainingData,
    folder: Path,
    *,
    ended: Ended,
    unreadable: list[Unreadable],
    memory: str,
    kind: Kind,
    ranks: OneRank,
    interruption: Interruption,
) -> bool:
    """Write all results on the first rank; the other ranks wait until the files are written.

    Returns whether neither steps nor scores were interrupted.
    """
    is_whole = ended.why != "interrupted"
    if ranks.is_first:
        if kind == "fsdp":  # parameters are divided, but the adapter is written from whole ones
            model = open_trainable(job.spec, job.choice, dtype=model.dtype, device="cpu", seed=job.seed)
        path, own = folder / BEST, model.trained()
        tensors, state = read_checkpoint(path)
        check_tensors(tensors, weight_shapes(own), num_steps=state.step, path=path)
        with torch.no_grad():
            for name, tensor in weights_of(tensors).items():
                own[name].copy_(tensor)
        model.questions = learned_questions(data.train, base=model.questions)
        bundle = write_model(job, model, folder)
        say(f"wrote `{shown_name(job.out)}`" + ("" if bundle is None else f" and `{shown_name(str(bundle))}`"))
        if ended.state.best and ended.state.best_step == 0 < ended.state.step:
            say(
                "note: no evaluation was better than the one before the first step, so these are the weights that the "
                "training began with; more --epochs or another --lr may help"
            )
        spec = trained_spec(job, model)
        if kind != "fsdp":
            model.release()  # the captioner needs this memory
        scores, unscored = _test_scores(job, spec, data, folder, ended=ended, interruption=interruption)
        is_whole = is_whole and unscored != _INTERRUPTED
        draw(job, folder)
        write_card(
            job,
            model,
            data,
            folder,
            state=ended.state,
            why=ended.why,
            unreadable=unreadable,
            scores=scores,
            unscored=unscored,
            memory=memory,
            bundle=bundle,
        )
        for one in scores:
            figure = one.figures[HEADLINES[one.task]]
            interval = "" if figure.low is None else f" (95 % interval {figure.low:.3f} to {figure.high:.3f})"
            say(f"test: {HEADLINES[one.task]} {figure.value or 0.0:.3f}{interval} of {figure.count:,} examples")
            if one.hint is not None:
                say(f"note: {one.hint}")
        scoring = score_command(job, data, folder=folder, bundle=bundle)
        if not scores and scoring is not None:
            say(f"note: the test examples are not scored: {unscored} Score them:\n{shown_text(scoring)}")
        asking = ask_command(job, data, folder=folder, bundle=bundle)
        say(f"`{shown_name(str(folder / CARD))}` has all figures, and more commands. Ask it:\n{shown_text(asking)}")
    ranks.wait()
    return is_whole


def _test_scores(
    job: TrainJob, spec: CaptionerSpec, data: TrainingData, folder: Path, *, ended: Ended, interruption: Interruption
) -> tuple[list[Scores], str]:
    """Scores of the test examples, or no scores and the reason.

    Errors are not raised, because the adapter is already written.
    """
    if not data.test:
        return [], "there are none."
    if ended.why == "interrupted" or interruption.is_asked:
        return [], _INTERRUPTED
    compared = num_compared(data.test)
    if compared > _MOST_TEST_COMPARED:
        return [], f"they have {compared:,} choices to compare, which takes long."
    if not job.quiet:
        say(f"scoring {len(data.test):,} test examples")
    try:
        with interruption.raised():
            return score_test(job, spec, data, folder), ""
    except KeyboardInterrupt:
        return [], _INTERRUPTED
    except (LlamaAdapterError, RuntimeError, OSError) as error:
        return [], f"{describe(error).sentence.rstrip('.')}."
