"""Measures the rounding of inputs of 8-bit layers, with scales of rows and calibrated ones. Prints a table in Markdown.

Usage: python -m scripts.input_scales_report [--calibration N] [--pictures N]

The embedded model in float32 is compared with its 8-bit bundle, whose scales are from drawings of another seed than
those of the logits. Logits are those of the captions that float32 generates. Answers are to the questions about the
sample pictures. "GPU" means the layers of `cuda_linear.py`, run on the CPU. In the last row the encoder has calibrated
scales too, which this project does not give it.
"""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.learning.quantising.samples import SampleSpec, quantise_calibrated
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.input_scales import insert_scales
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.runtime import devices
from llama_adapter.runtime.devices.base import Accelerator
from llama_adapter.runtime.devices.cpu import CpuBackend
from llama_adapter.runtime.devices.cuda_linear import RoundedLinear
from llama_adapter.runtime.schemes import OperatorChoice
from llama_adapter.runtime.schemes.int8 import LARGEST
from llama_adapter.runtime.schemes.layers import replace_quantised
from llama_adapter.vision.encoder import PictureEncoder
from llama_adapter.vision.image import PictureSource
from llama_adapter.vision.inference import HostEncoder
from scripts.bits_report import Halves, compare_logits
from scripts.common import parser_of
from scripts.train_embedded.score import draw_exam

_SEED, _CALIBRATION_SEED = 3, 4  # of the drawings


class GpuLayers(CpuBackend):
    """The CPU with the layers that a GPU uses with operators w8a8; `encoder_scales` are for the encoder's, in order."""

    name = "gpu:0"

    def __init__(self, encoder_scales: Sequence[Tensor] = ()) -> None:
        self.encoder_scales = encoder_scales

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        replace_quantised(module, lambda linear, precision: RoundedLinear(linear))
        if isinstance(module, (PictureEncoder, HostEncoder)) and self.encoder_scales:
            for layer, scale in zip(rounded_layers(module), self.encoder_scales, strict=True):
                layer.input_scale = scale
        super().prepare(module, wanted=wanted)


def rounded_layers(module: nn.Module) -> list[RoundedLinear]:
    return [layer for layer in module.modules() if isinstance(layer, RoundedLinear)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A bundle, the operators that it runs with, and the backend whose layers compute."""

    name: str
    bundle: Path
    backend: CpuBackend
    operators: OperatorChoice = "w8a8"


def prepared(variant: Variant) -> Halves:
    """Encoder and decoder of a variant in float32."""
    model = load_bundle(variant.bundle, dtype=torch.float32)
    scales = model.input_scales if variant.operators == "w8a8" else {}
    state = dict(insert_scales(model.decoder_state.items(), scales))
    model = dataclasses.replace(model, decoder_state=state)
    return Halves(model, backend=variant.backend, operators=variant.operators)


def largest_inputs(bundle: Path, pictures: Sequence[PictureSource]) -> list[Tensor]:
    """The scale of the inputs of each layer of the encoder, as `quantize --calibrate` finds those of the decoder."""
    halves = prepared(Variant(name="", bundle=bundle, backend=GpuLayers()))
    layers = rounded_layers(halves.encoder)
    largest: dict[nn.Module, Tensor] = {}

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found = inputs[0].abs().amax().reshape(1)
        largest[layer] = torch.maximum(largest.get(layer, found), found)

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    halves.visual_queries(pictures)
    for hook in hooks:
        hook.remove()
    return [largest[layer] / LARGEST for layer in layers]


def sample_answers(variant: Variant) -> tuple[int, int, int]:
    """The numbers of questions, of right answers, and of questions about unfamiliar pictures."""
    asked = [json.loads(line) for line in (sample_pictures() / "questions.jsonl").read_text().splitlines()]
    gpu = Accelerator(kind="gpu", is_installed=lambda: True, count=lambda: 1, open=lambda index: variant.backend)
    device = "gpu:0" if isinstance(variant.backend, GpuLayers) else "cpu"
    with (
        patch.object(devices, "ACCELERATORS", (gpu,)),
        Captioner.load(variant.bundle, device=device, operators=variant.operators, dtype="float32") as captioner,
    ):
        files = [sample_pictures() / one["picture"] for one in asked]
        answers = captioner.generate(files, [one["question"] for one in asked])
    right = sum(answer.text.strip() == one["answer"] for answer, one in zip(answers, asked, strict=True))
    return len(asked), right, sum(bool(answer.unfamiliar) for answer in answers)


def report(variants: Sequence[Variant], pictures: Sequence[PictureSource]) -> str:
    """The table of all variants; the first one is what the others are compared with."""
    with Captioner.load(variants[0].bundle, device="cpu", dtype="float32") as captioner:
        tokens = [answer.token_ids for answer in captioner.generate(pictures)]
    plain = prepared(variants[0])
    queries = plain.visual_queries(pictures)
    logits = plain.answer_logits(queries, tokens)
    lines = [
        "| inputs | visual query | largest error of a logit | logits | unfamiliar | right answers |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for variant in variants:
        halves = prepared(variant)
        seen = halves.visual_queries(pictures)
        errors = compare_logits(halves.answer_logits(seen, tokens), logits)
        asked, right, unfamiliar = sample_answers(variant)
        query, largest = (seen - queries).norm() / queries.norm(), errors["max_error"] / float(logits.abs().max())
        figures = f"{query:.4f} | {largest:.4f} | {errors['relative_error']:.4f} | {unfamiliar} | {right} of {asked}"
        lines.append(f"| {variant.name} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--calibration", type=int, default=256, help="drawings that give the scales")
    parser.add_argument("--pictures", type=int, default=200, help="drawings whose logits are compared")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        drawings, calibrated = Path(folder) / "drawings", Path(folder) / "calibrated"
        drawings.mkdir()
        known = draw_exam(num_pictures=options.calibration, seed=_CALIBRATION_SEED).pictures
        for index, picture in enumerate(known):
            picture.save(drawings / f"{index:04}.png")
        quantise_calibrated(QuantiseJob(out=str(calibrated)), SampleSpec(pictures=(str(drawings),)))
        plain = quantise_bundle(QuantiseJob(out=str(Path(folder) / "plain")))
        whole = GpuLayers(largest_inputs(plain, known))
        variants = (
            Variant(name="float32", bundle=embedded_model(), backend=CpuBackend(), operators="auto"),
            Variant(name="8 bits, groups of a row (CPU)", bundle=plain, backend=CpuBackend()),
            Variant(name="8 bits, rows (GPU)", bundle=plain, backend=GpuLayers()),
            Variant(name="8 bits, calibrated (CPU)", bundle=calibrated, backend=CpuBackend()),
            Variant(name="8 bits, calibrated (GPU)", bundle=calibrated, backend=GpuLayers()),
            Variant(name="8 bits, encoder calibrated too (GPU)", bundle=calibrated, backend=whole),
        )
        print(report(variants, draw_exam(num_pictures=options.pictures, seed=_SEED).pictures))


if __name__ == "__main__":
    main()
