"""Decoders exported for tests, once for each process."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from llama_adapter.app.graph_export.decoder import DecoderJob, run_export_decoder
from tests.app.golden import model_options


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="exported-", ignore_cleanup_errors=True)


@functools.cache
def exported_golden(adapter: str) -> str:
    """The decoder of a golden model, without its picture encoder."""
    out = str(Path(_folder().name) / adapter)
    run_export_decoder(DecoderJob(out=out, encoder=False, **model_options(adapter)))
    return out


@functools.cache
def exported_embedded(**options: Any) -> str:
    """The embedded model with its encoder; `options` are those of `DecoderJob`."""
    out = str(Path(_folder().name) / "-".join(map(str, ["embedded", *options.values()])))
    run_export_decoder(DecoderJob(out=out, **options))
    return out
