"""Measures 8-bit weights with inputs rounded by dynamic and static scales: errors of logits, and answers. Prints a table.

Usage: python -m scripts.input_scales_report [--calibration N] [--pictures N]

Scales are calibrated with drawings of another seed than those of the logits. Answers are those to the questions about
the sample pictures. "int8, CPU" is computed by the C kernels; the others by the layers that a GPU uses, on the CPU.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.input_scales import DECODER, ENCODER, insert_scales
from llama_adapter.app.models.quantised_model import QuantiseJob
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.quantising.calibrated import quantise_calibrated
from llama_adapter.app.quantising.samples import SampleSpec
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.devices.cpu import CpuBackend
from llama_adapter.runtime.devices.cuda_linear import RoundedLinear
from llama_adapter.runtime.schemes.layers import replace_quantised
from llama_adapter.vision.encoder import encoder_from_state
from scripts.bits_report import Halves, compare_logits
from scripts.train_embedded.score import draw_exam


class Variant(Halves):
    """Encoder and decoder of a bundle in float32."""

    def __init__(self, bundle: Path, prepare: Callable[[nn.Module], Any], *, scales: tuple[str, ...] = ()) -> None:
        model = load_bundle(bundle, dtype=torch.float32)
        self.tokenizer, self.prompt = model.tokenizer, model.prompt
        self.image_size = model.vision_config.clip.image_size

        def state(tensors: dict[str, Tensor], half: str) -> dict[str, Tensor]:
            return dict(insert_scales(tensors.items(), model.input_scales if half in scales else {}, half))

        self.encoder = encoder_from_state(model.vision_config, state(model.vision_state, ENCODER))
        self.decoder = decoder_from_state(model.decoder_config, state(model.decoder_state, DECODER))
        for module in (self.encoder, self.decoder):
            prepare(module)


def rounding(module: nn.Module) -> None:
    replace_quantised(module, lambda linear, precision: RoundedLinear(linear))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calibration", type=int, default=256)
    parser.add_argument("--pictures", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        drawings = Path(folder) / "drawings"
        drawings.mkdir()
        for index, picture in enumerate(draw_exam(num_pictures=options.calibration, seed=4).pictures):
            picture.save(drawings / f"{index:03}.png")
        bundle = Path(folder) / "bundle"
        quantise_calibrated(QuantiseJob(out=str(bundle)), SampleSpec(pictures=(str(drawings),)))
        pictures = draw_exam(num_pictures=options.pictures, seed=3).pictures
        with Captioner.load(dtype="float32") as captioner:
            tokens = [answer.token_ids for answer in captioner.generate(pictures)]
        kernels = CpuBackend().prepare
        plain = Variant(Path(embedded_model()), kernels)
        queries = plain.visual_queries(pictures)
        logits = plain.answer_logits(queries, tokens)
        for name, variant in (
            ("int8, CPU", Variant(bundle, kernels)),
            ("dynamic", Variant(bundle, rounding)),
            ("static, CPU", Variant(bundle, kernels, scales=(ENCODER, DECODER))),
            ("static", Variant(bundle, rounding, scales=(ENCODER, DECODER))),
            ("static decoder, CPU", Variant(bundle, kernels, scales=(DECODER,))),
            ("static decoder", Variant(bundle, rounding, scales=(DECODER,))),
        ):
            found = variant.visual_queries(pictures)
            theirs = variant.answer_logits(found, tokens)
            errors = compare_logits(theirs, logits)
            print(
                name,
                float((found - queries).norm() / queries.norm()),
                errors["max_error"] / float(logits.abs().max()),
                errors,
                flush=True,
            )


if __name__ == "__main__":
    main()
