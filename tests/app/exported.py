"""Decoders exported for tests, once per test run."""

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.graph_export.to_om import OmJob, run_export_om
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.exported.export import DECODER_FILE, PREFIX_FILE
from llama_adapter.runtime.graphs.atc import AtcSettings
from tests.app.golden import model_options
from tests.fakes.exported import ROOT, SOC, made_once

# Gears of OMs: they allow fewer rows in a step than the tests use, and some parts are padded.
_GEARS = ("R=4,S=128,P=1,T=16", "R=1,S=512,P=1,T=64", "R=1,S=1,P=128,T=1", "R=5,S=1,P=128,T=5", "R=8,S=1,P=512,T=8")


@functools.cache
def exported_golden(adapter: str) -> str:
    """The decoder of a golden model, without its picture encoder. Tests must not change it."""
    with made_once(f"decoder-{adapter}") as (path, is_missing):
        if is_missing:
            run_export_decoder(DecoderJob(out=str(path), spec=CaptionerSpec(**model_options(adapter)), encoder=False))
    return str(path)


@functools.cache
def exported_embedded(**options: Any) -> str:
    """The embedded model with its encoder; `options` are those of `DecoderJob`. Tests must not change it."""
    with made_once("-".join(map(str, ["decoder-embedded", *options.values()]))) as (path, is_missing):
        if is_missing:
            run_export_decoder(DecoderJob(out=str(path), **options))
    return str(path)


@functools.cache
def om_golden(adapter: str) -> str:
    """Like `exported_golden`, compiled by the stand-in for ATC."""
    return _compiled(f"decoder-om-{adapter}", **model_options(adapter))


@functools.cache
def om_embedded() -> tuple[str, str]:
    """The embedded model's decoder and encoder, compiled by the stand-in for ATC."""
    folder, encoder = _compiled("decoder-om-embedded"), Path(exported_embedded()) / "encoder.onnx"
    with made_once("encoder.om") as (path, is_missing):
        if is_missing:
            _run_atc(encoder, out=str(path), settings={"batch_sizes": (1, 8), "gears": True})
    return folder, str(path)


def _compiled(name: str, **model: Any) -> str:
    with made_once(name) as (path, is_missing):
        if is_missing:
            compile_decoder(path, **model)
    return str(path)


def compile_decoder(out: Path, **model: Any) -> None:
    """Export a decoder into a folder, and compile it by the stand-in for ATC."""
    run_export_decoder(DecoderJob(spec=CaptionerSpec(**model), out=str(out), format="onnx-atc", encoder=False))
    _run_atc(out / DECODER_FILE, sizes=_GEARS)
    if (out / PREFIX_FILE).exists():  # the adapter sees pictures
        _run_atc(out / PREFIX_FILE, sizes=("B=1", "B=4"))


def _run_atc(file: Path, *, settings: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), str(ROOT / "tests" / "fakes"), os.environ["PATH"]))
    chosen = AtcSettings(soc_version=SOC, precision_mode="origin", **settings)
    with mock.patch.dict(os.environ, PATH=path):
        run_export_om(OmJob(onnx=str(file), settings=chosen, **options))
