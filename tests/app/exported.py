"""Decoders exported for tests, once for each test run."""

import functools
from typing import Any

from llama_adapter.app.graph_export.decoder import DecoderJob, run_export_decoder
from tests.app.golden import model_options
from tests.fakes.exported import made_once


@functools.cache
def exported_golden(adapter: str) -> str:
    """The decoder of a golden model, without its picture encoder. Not to be changed by a test."""
    with made_once(f"decoder-{adapter}") as (path, is_missing):
        if is_missing:
            run_export_decoder(DecoderJob(out=str(path), encoder=False, **model_options(adapter)))
    return str(path)


@functools.cache
def exported_embedded(**options: Any) -> str:
    """The embedded model with its encoder; `options` are those of `DecoderJob`. Not to be changed by a test."""
    with made_once("-".join(map(str, ["decoder-embedded", *options.values()]))) as (path, is_missing):
        if is_missing:
            run_export_decoder(DecoderJob(out=str(path), **options))
    return str(path)
