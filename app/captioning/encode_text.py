"""Computes keys and values of a text, and stores them as a past to be put in front of prompts."""

import dataclasses
from pathlib import Path

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.llm.weights.past import write_pre_caches
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.vision.backends.base import NoEncoder


def encode_text(spec: CaptionerSpec, text: str, path: Path) -> int:
    """Write the keys and values of a text, without a picture, as PaddleNLP's `pre_caches.npy`; returns the token count.

    If the spec has a past, it is put in front of the text. The learned prompt of an adapter for texts is attended to,
    as in `generate`. Raises PromptTooLongError for a text that fills the context, ValueError for a text that cannot be
    encoded, CheckpointError, DeviceError and OSError.
    """
    parts = assemble_parts(dataclasses.replace(spec, batch_size=1), vision=NoEncoder())
    runner = parts.runner
    assert isinstance(runner, EagerRunner | KernelRunner), "so are all of a model's own weights"
    engine = Engine(runner, eos_id=parts.model.tokenizer.end_ids)
    ids = tuple(parts.model.tokenizer.encode(text))
    engine.check(ids)
    prefix = engine.learned_prefix() if parts.info.has_text_adapter else engine.empty_prefix()
    runner.prefill([ids], [prefix], first_slot=0)
    past = runner.kept(num_tokens=len(ids))
    with atomic_write(path) as file:
        write_pre_caches(file, past, runner.config.decoder)
    return len(past)
