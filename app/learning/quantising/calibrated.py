"""Writes a bundle whose weights are rounded for the layer inputs that sample pictures give."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from llama_adapter.app.learning.quantising.rounding import round_model
from llama_adapter.app.learning.quantising.samples import SampleSpec, collect_samples
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.runtime.terminal.stderr_lines import can_overwrite_lines, say


def quantise_calibrated(job: QuantiseJob, samples: SampleSpec) -> Path:
    """As `quantise_bundle`, but rounded for the samples.

    Raises the errors of `quantise_bundle` and `collect_samples`.
    """
    bundle = None if job.model is None else os.path.abspath(job.model)  # a path, not a name to search for

    def round_weights(model: LoadedModel) -> tuple[LoadedModel, Iterator[tuple[str, Tensor]]]:
        started = time.perf_counter()
        found = collect_samples(samples, model=bundle, vision=model.vision_config)
        num_tokens, elapsed_s = sum(len(sample.token_ids) for sample in found), time.perf_counter() - started
        say(f"calibrating with {len(found)} pictures and {num_tokens:,} tokens, answered in {elapsed_s:,.0f} s")
        return round_model(model, found, dtype=model.dtype, precision=job.precision, progress=_show)

    return quantise_bundle(job, round_weights=round_weights)


def _show(done: int, everything: int) -> None:
    if can_overwrite_lines():
        say(f"\r{done} of {everything} layers rounded\x1b[K", end="\n" if done == everything else "")
