"""Encoders of the golden model as ONNX, made once per test run, and what exported models may differ by."""

import copy
import functools
import io
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.graph_export import to_onnx
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.export import export_onnx
from tests.bounds import Float64, jittered, spread
from tests.fakes.exported import embedded, embedded_encoder, made_once, number_made_once, sample_pixels
from tests.llm.toys import forward
from tests.parity.golden import GOLDEN, model, picture

ODD_UMASK = 0o063  # no program writes the modes 604 and 714 by itself


def reading_here() -> Any:
    """A context, or a decorator of tests: exports read pictures in this process. Starting another one takes seconds."""
    return mock.patch.object(to_onnx, "open_reader", lambda kind, *spec, **how: open_reader("thread", *spec, **how))


def golden_onnx() -> Path:
    """The encoder of BIAS-TINY in float32, made by the command. Files .out and .err next to it have stdout and stderr.

    It is made with `ODD_UMASK`, so that its mode can be tested. Tests must not change the file.
    """
    with made_once("golden.onnx") as (path, is_missing):
        if is_missing:
            flags = ["--adapter", str(GOLDEN / "adapters" / "BIAS-TINY.pth"), "--visual-heads", "4"]
            flags += ["--clip", str(GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"), "--pictures", picture()]
            said = {".out": io.StringIO(), ".err": io.StringIO()}
            before = os.umask(ODD_UMASK)
            try:
                with reading_here(), redirect_stdout(said[".out"]), redirect_stderr(said[".err"]):
                    assert main(["export", "onnx", *flags, "--out", str(path)]) == 0
            finally:
                os.umask(before)
            for suffix, text in said.items():
                path.with_suffix(suffix).write_text(text.getvalue())
    return path


def golden_bgr_onnx() -> Path:
    """The encoder of BIAS-TINY as a BGR model, float16, opset 17, made without output.

    Tests must not change the file.
    """
    with made_once("golden-bgr.onnx") as (path, is_missing):
        if is_missing:
            encoder = model("BIAS-TINY", channel_order="bgr").encoder
            with redirect_stdout(io.StringIO()) as said, redirect_stderr(said), warnings.catch_warnings():
                warnings.simplefilter("error")
                export_onnx(encoder.config, encoder.state_dict(), path, name="tiny", dtype="float16", opset=17)
            assert said.getvalue() == ""
    return path


@functools.cache
def choice_limit() -> float:
    """How far apart the embedded model's probabilities of choices may be, relative to them, by two float32 programs.

    They are softmax of the choices' log-probabilities, and a difference of two of these is the relative difference.
    """
    return number_made_once("choice-limit", _choice_limit)


def _choice_limit() -> float:
    model, pixels = embedded(), torch.from_numpy(sample_pixels())
    encoder, decoder = embedded_encoder(), decoder_from_state(model.decoder_config, model.decoder_state)
    prompt = model.tokenizer.encode("Is there a red star?")

    def scores(encoder: PictureEncoder, decoder: LlamaAdapterDecoder) -> torch.Tensor:
        prefix, found = decoder.project_prefix(encoder(pixels)), []
        for choice in ("yes", "no"):
            ids = torch.tensor([*prompt, *model.tokenizer.encode(choice)[1:], model.tokenizer.eos_id])
            logprobs = decoder.logits(forward(decoder, ids.expand(len(pixels), -1), prefix)).log_softmax(-1)
            found.append(
                logprobs[:, len(prompt) - 1 : -1].gather(2, ids[len(prompt) :].expand(len(pixels), -1)[..., None])
            )
        return torch.stack([part.sum((1, 2)) for part in found])

    others = [scores(jittered(encoder, seed=seed), jittered(decoder, seed=seed)) for seed in range(2)]
    computed = scores(encoder, decoder)
    with Float64():
        exact = scores(copy.deepcopy(encoder).double(), copy.deepcopy(decoder).double())
    return 2 * spread(computed, exact, *others)
