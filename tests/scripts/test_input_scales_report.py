"""The report on scales of inputs: its variants compute with the layers that it names."""

import pytest
import torch

from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.runtime.devices.cpu_linear import NativeLinear
from scripts.common import sample_files
from scripts.input_scales_report import GpuLayers, Variant, largest_inputs, prepared, rounded_layers


@pytest.mark.slow
def test_the_encoder_can_have_scales_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = quantise_bundle(QuantiseJob(out=str(tmp_path_factory.mktemp("plain") / "bundle")))
    pictures = [str(file) for file in sample_files()[:4]]

    scales = largest_inputs(bundle, pictures)
    dynamic, static = (prepared(Variant(name="", bundle=bundle, backend=GpuLayers(given))) for given in ((), scales))

    layers = rounded_layers(static.encoder)
    assert [layer.input_scale for layer in layers] == scales
    assert len(scales) == len(rounded_layers(dynamic.encoder)) > 0
    assert not any(isinstance(layer, NativeLinear) for layer in static.decoder.modules())
    one, other = (halves.visual_queries(pictures) for halves in (dynamic, static))
    assert not torch.equal(one, other)
    assert float((one - other).norm()) < 0.1 * float(one.norm())
