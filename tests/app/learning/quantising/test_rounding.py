"""Rounding both halves of a model with samples: which inputs count, and that answers stay closer to the float model."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_adapter.app.learning.quantising import rounding
from llama_adapter.app.learning.quantising.rounding import Sample, round_model
from llama_adapter.app.learning.quantising.samples import SampleSpec, collect_samples
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import quantise_model
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.layers import dequantise_linears
from llama_adapter.runtime.schemes.scheme import Parts, TensorForm, find_scheme
from llama_adapter.vision.encoder import encoder_from_state
from tests.app.assembled import assemble_sources
from tests.app.golden import model_options
from tests.llm.toys import forward

FILES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_bundle(embedded_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(model: LoadedModel) -> list[Sample]:
    return collect_samples(SampleSpec(pictures=tuple(FILES), reader="thread"), model=None, vision=model.vision_config)


def rounded(model: LoadedModel, samples: Sequence[Sample]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    quantised, tensors = round_model(model, samples, dtype=torch.float32, precision="int4")
    return dict(quantised.vision_state), dict(tensors)


@torch.inference_mode()
def outputs(
    model: LoadedModel, vision_state: dict[str, Tensor], decoder_state: dict[str, Tensor], samples: Sequence[Sample]
) -> tuple[Tensor, Tensor]:
    """The samples' visual queries, and the logits at their last tokens."""
    encoder = encoder_from_state(model.vision_config, vision_state)
    decoder = decoder_from_state(model.decoder_config, decoder_state)
    for half in (encoder, decoder):
        dequantise_linears(half)
    visual_queries = encoder(torch.from_numpy(np.stack([sample.pixels for sample in samples])))
    logits = []
    for sample, visual_query in zip(samples, visual_queries, strict=True):
        prefix = decoder.project_prefix(visual_query[None])
        hidden = forward(decoder, torch.tensor([sample.token_ids]), prefix)
        logits.append(decoder.logits(hidden[0, sample.num_prompt_tokens - 1 :]))
    return visual_queries, torch.cat(logits)


@pytest.mark.slow
def test_outputs_about_other_pictures_are_closer_than_with_nearest_rounding(
    model: LoadedModel, samples: list[Sample]
) -> None:
    known, others = samples[:22], samples[22:]
    nearest, tensors = quantise_model(model, model.decoder_state.items(), dtype=torch.float32, precision="int4")
    expected = outputs(model, dict(model.vision_state), model.decoder_state, others)

    by_nearest = outputs(model, dict(nearest.vision_state), dict(tensors), others)
    calibrated = outputs(model, *rounded(model, known), others)

    for what, ours, theirs, wanted in zip(("visual query", "logits"), calibrated, by_nearest, expected, strict=True):
        assert float((ours - wanted).norm()) < 0.7 * float((theirs - wanted).norm()), what


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])  # LORA: the adapter has its own layers
def test_every_linear_layer_of_a_model_is_rounded(adapter: str) -> None:
    model = assemble_sources(CaptionerSpec(**model_options(adapter)))
    side, rng = model.vision_config.clip.image_size, np.random.default_rng(0)
    samples = [
        Sample(pixels=rng.integers(0, 256, (side, side, 3), dtype=np.uint8), token_ids=(1, *ids), num_prompt_tokens=3)
        for ids in rng.integers(3, 100, (8, 6)).tolist()
    ]
    seen: list[tuple[int, int]] = []

    vision, tensors = round_model(
        model, samples, dtype=torch.float32, precision="int4", progress=lambda done, all: seen.append((done, all))
    )

    for config, state in ((model.vision_config, vision.vision_state), (model.decoder_config, dict(tensors))):
        forms = expected_forms(config, dtype=torch.float32, precision="int4")
        assert {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()} == forms
    assert seen == [(number + 1, len(seen)) for number in range(len(seen))]
    assert vision.origin.calibration_pictures == 8


def hessians(model: LoadedModel, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The Hessians of the decoder's linear layers, named by layer number and name, such as "0.down"."""
    scheme, found = find_scheme("int4"), []

    def calibrate(weight: Tensor, hessian: Tensor) -> Parts:
        found.append(hessian.clone())
        return scheme.quantise(weight)

    spy = dataclasses.replace(scheme, calibrate=calibrate)
    monkeypatch.setattr(rounding, "find_scheme", lambda precision: spy)
    rounded(model, samples)
    num_decoders = 4 * model.decoder_config.num_layers + 1
    names = [f"{layer}.{name}" for layer in range(4) for name in ("qkv", "out", "gate_up", "down")] + ["head"]
    assert len(names) == num_decoders
    return dict(zip(names, found[-num_decoders:], strict=True))


def test_padding_does_not_count(model: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    by_length = sorted(samples, key=lambda sample: len(sample.token_ids))
    short, long = by_length[0], by_length[-1]
    assert len(short.token_ids) < len(long.token_ids)

    alone = [hessians(model, [sample], monkeypatch) for sample in (short, long)]
    together = hessians(model, [short, long], monkeypatch)

    for name in ("0.qkv", "0.out", "0.down", "2.qkv", "3.down", "head"):
        # A Hessian is a sum over tokens, so one more would add about a token's share to it. Rounding adds far less.
        share = float(alone[0][name].trace()) / len(short.token_ids)
        assert float((together[name] - alone[0][name] - alone[1][name]).norm()) < 0.01 * share, name


def test_the_adapters_tokens_count_in_the_layers_that_project_them(
    model: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = samples[0]
    other = dataclasses.replace(one, pixels=samples[1].pixels)

    first, second = (hessians(model, [sample], monkeypatch) for sample in (one, other))

    # Layer 1 is the first with an adapter. Its text tokens do not depend on the picture yet; the adapter's tokens do.
    assert model.decoder_config.first_adapter_layer == 1
    torch.testing.assert_close(first["0.down"], second["0.down"])
    assert float((first["1.qkv"] - second["1.qkv"]).norm()) > 0.01 * float(first["1.qkv"].norm())


def test_quantised_models_and_damaged_weights_are_refused(model: LoadedModel, samples: list[Sample]) -> None:
    quantised = load_bundle(embedded_model(), precision="int8")
    damaged = dict(model.decoder_state)
    damaged["layers.2.feed_forward.down.weight"] = damaged["layers.2.feed_forward.down.weight"] * float("nan")

    with pytest.raises(CheckpointError, match="already"):
        rounded(quantised, samples[:8])
    with pytest.raises(CheckpointError, match=r"layers\.2\.feed_forward\.down"):
        rounded(dataclasses.replace(model, decoder_state=damaged), samples[:8])
