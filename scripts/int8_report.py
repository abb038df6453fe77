"""Measures the effect of 8-bit weights on the embedded model, and writes docs/int8.json and docs/int8.md.

Usage: python -m scripts.int8_report [--pictures N] [--outliers SIZE] [--out FOLDER] [--quick]
"""

# B pictures, S tokens, D model width, V vocabulary, Q queries

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.random_model import random_model
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.sketch import sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.prompt import format_prompt
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.kernels.linear import NativeLinear
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.state import linear_weights, quantise
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.image import PictureSource, load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.common import run_bench, sample_files, tell
from scripts.train_embedded.score import Exam, answer_all, draw_exam, grade

CAPTION_TOKENS = 48
_SEED = 3  # of the exams; no other page uses these pictures
_LOGIT_BATCH = 32  # pictures in one pass
_OUTLIER_CHANNEL, _OUTLIER_FACTOR = 100, 30.0
_OUTLIER_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    pictures: int = 500
    outliers: str = "160M"  # size of a random decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Which halves of the model have 8-bit weights."""

    name: str
    decoder: Precision = "float"
    encoder: Precision = "float"


VARIANTS = (
    Variant(name="float32"),
    Variant(name="decoder int8", decoder="int8"),
    Variant(name="encoder int8", encoder="int8"),
    Variant(name="both int8", decoder="int8", encoder="int8"),
)


def mixed_model(variant: Variant) -> LoadedModel:
    """The embedded model in float32, with the variant's halves in 8 bits."""
    halves = {one: load_bundle(embedded_model(), dtype=torch.float32, precision=one) for one in ("float", "int8")}
    return dataclasses.replace(
        halves[variant.decoder], vision_state=halves[variant.encoder].vision_state, precision=variant.decoder
    )


def open_captioner(variant: Variant, *, batch_size: int = 16) -> Captioner:
    """The product's own, around the variant's weights."""
    spec = CaptionerSpec(device="cpu", dtype="float32", batch_size=batch_size)
    return Captioner(assemble_parts(spec, load=lambda dtype: mixed_model(variant)))


def agreement(answers: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, float]:
    """Shares of captions that are equal, and of tokens that are, at their places, of the longer caption each."""
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(answers, expected, strict=True)]
    num_equal = sum(sum(a == b for a, b in zip(one, other, strict=False)) for one, other in pairs)
    return {
        "captions": sum(one == other for one, other in pairs) / len(pairs),
        "tokens": num_equal / sum(max(len(one), len(other)) for one, other in pairs),
    }


class Halves:
    """Encoder and decoder of a variant as modules that the CPU has prepared: the same linear layers, all logits."""

    def __init__(self, variant: Variant) -> None:
        model = mixed_model(variant)
        backend = open_backend("cpu")
        self.tokenizer, self.prompt = model.tokenizer, model.prompt
        self.image_size = model.vision_config.clip.image_size
        self.encoder: PictureEncoder = encoder_from_state(model.vision_config, model.vision_state)
        self.decoder: LlamaAdapterDecoder = decoder_from_state(model.decoder_config, model.decoder_state)
        backend.prepare(self.encoder)
        backend.prepare(self.decoder)

    @torch.inference_mode()
    def visual_queries(self, pictures: Sequence[PictureSource]) -> Tensor:
        """(B, Q, D) float32."""
        pixels = [preprocess(load_picture(picture).image, size=self.image_size) for picture in pictures]
        parts = [
            self.encoder(torch.from_numpy(np.stack(pixels[start : start + _LOGIT_BATCH])))
            for start in range(0, len(pixels), _LOGIT_BATCH)
        ]
        return torch.cat(parts)

    @torch.inference_mode()
    def answer_logits(self, visual_query_BQD: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """Logits (tokens of all answers, V) at the places before each token of an answer, which is given to the model.

        Rows are padded behind, where no token before sees it.
        """
        prompt = self.tokenizer.encode(format_prompt(self.prompt))
        logits = []
        for start in range(0, len(answers), _LOGIT_BATCH):
            part = answers[start : start + _LOGIT_BATCH]
            length = len(prompt) + max(map(len, part)) - 1
            tokens_BS = torch.zeros(len(part), length, dtype=torch.long)
            for row, answer in enumerate(part):
                ids = [*prompt, *answer][: len(prompt) + len(answer) - 1]
                tokens_BS[row, : len(ids)] = torch.tensor(ids)
            prefix = self.decoder.project_prefix(visual_query_BQD[start : start + _LOGIT_BATCH])
            hidden_BSD = run_decoder(self.decoder, tokens_BS, prefix)
            for row, answer in enumerate(part):
                first = len(prompt) - 1
                logits.append(self.decoder.logits(hidden_BSD[row, first : first + len(answer)]))
        return torch.cat(logits)


def run_decoder(decoder: LlamaAdapterDecoder, tokens_BS: Tensor, prefix: Prefix) -> Tensor:
    """Hidden states (B, S, D) of tokens that see those before them."""
    length = tokens_BS.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    hidden_BSD: Tensor = decoder(tokens_BS, torch.arange(length)[None], mask, prefix)
    return hidden_BSD


def compare_logits(logits: Tensor, expected: Tensor) -> dict[str, float]:
    """Errors of logits (N, V) in their own unit, and the standard deviation `std` of the expected logits."""
    error = (logits - expected).abs()
    return {
        "max_error": float(error.max()),
        "mean_error": float(error.mean()),
        "std": float(expected.std()),
        "relative_error": float((logits - expected).norm() / expected.norm()),
        "same_best": float((logits.argmax(-1) == expected.argmax(-1)).float().mean()),
    }


@torch.inference_mode()
def rows_on_their_own(halves: Halves, pictures: Sequence[PictureSource]) -> dict[str, int]:
    """The number of calls of native layers, and of those with a row that differs from the row alone (0 is promised).

    The inputs are those of one pass over `pictures` and their caption prompt.
    """
    num_layers, unequal = 0, 0

    def look(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal num_layers, unequal
        x = inputs[0]
        alone = torch.cat([module.forward(x[row : row + 1]) for row in range(len(x))])
        num_layers += 1
        unequal += not torch.equal(alone, out)

    modules = [*halves.encoder.modules(), *halves.decoder.modules()]
    hooks = [module.register_forward_hook(look) for module in modules if isinstance(module, NativeLinear)]
    try:
        visual_query = halves.visual_queries(pictures)
        halves.answer_logits(visual_query, [[1]] * len(pictures))
    finally:
        for hook in hooks:
            hook.remove()
    return {"layer_calls": num_layers, "unequal": unequal}


def outlier_error(size: str) -> dict[str, float]:
    """Relative logit error of a random decoder of that size in 8 bits, without and with outliers.

    For outliers in every row, one channel of every norm is made thirty times as large.
    """
    model = random_model(size, dtype=torch.float32)
    return {
        "plain": _relative_error(model, model.decoder_state),
        "planted": _relative_error(model, _plant(model.decoder_state)),
    }


def _plant(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    planted = dict(state)
    for name in (name for name in state if name.endswith("norm.weight")):
        planted[name] = state[name].clone()
        planted[name][_OUTLIER_CHANNEL] *= _OUTLIER_FACTOR
    return planted


def _relative_error(model: LoadedModel, state: Mapping[str, Tensor]) -> float:
    linears = linear_weights(sketch(model.decoder_config))
    in_int8 = dict(quantise(state.items(), linears=linears, dtype=torch.float32, precision="int8"))
    expected, logits = (_random_logits(model, one) for one in (state, in_int8))
    return float((logits - expected).norm() / expected.norm())


@torch.inference_mode()
def _random_logits(model: LoadedModel, state: Mapping[str, Tensor]) -> Tensor:
    config = model.decoder_config
    generator = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(3, config.vocab_size, (1, _OUTLIER_TOKENS), generator=generator)
    visual_query_BQD = torch.randn(1, config.num_queries, config.dim, generator=generator)
    decoder = decoder_from_state(config, state)
    open_backend("cpu").prepare(decoder)
    return decoder.logits(run_decoder(decoder, tokens_BS, decoder.project_prefix(visual_query_BQD)))


def measure_variants(
    pictures: Mapping[str, Sequence[PictureSource]], exams: Mapping[str, Exam]
) -> list[dict[str, Any]]:
    """All figures of all variants, float32 first; `pictures` are sets by name."""
    results: list[dict[str, Any]] = []
    expected: tuple[dict[str, list[Answer]], Tensor, Tensor] | None = (
        None  # captions, visual queries, logits of float32
    )
    for variant in VARIANTS:
        halves = Halves(variant)
        with open_captioner(variant) as captioner:
            answers = {
                name: captioner.generate(files, max_new_tokens=CAPTION_TOKENS) for name, files in pictures.items()
            }
            scores = {
                name: grade([question for _, question in exam.questions], answer_all(captioner, exam))
                for name, exam in exams.items()
            }
        with open_captioner(variant, batch_size=1) as captioner:
            alone = captioner.generate(pictures["samples"], max_new_tokens=CAPTION_TOKENS)
        seen = halves.visual_queries(pictures["drawings"])
        forced = [answer.token_ids for answer in (expected[0] if expected else answers)["drawings"]]
        found = halves.answer_logits(seen, forced)
        captions, queries, logits = expected = expected or (answers, seen, found)
        result = {
            "name": variant.name,
            "scores": scores,
            "same_alone": agreement(alone, answers["samples"]),
            "agreement": {name: agreement(answers[name], captions[name]) for name in pictures},
            "logits": {"drawings": compare_logits(found, logits)},
            "visual_query_error": {"drawings": float((seen - queries).norm() / queries.norm())},
            "rows": rows_on_their_own(halves, pictures["samples"]),
        }
        results.append(result)
        tell(f"{variant.name}: {result['agreement']}")
    return results


def measure(settings: Settings) -> dict[str, Any]:
    """Raises DeviceError on a machine without 8-bit kernels, where int8 weights would be widened."""
    if not open_backend("cpu").computes_in("int8", torch.float32):
        raise DeviceError(
            "This machine does not compute in 8 bits, so the report cannot be made here",
            hint="it takes a C compiler and a processor with AVX-512",
        )
    exams = {
        "plain": draw_exam(num_pictures=settings.pictures, seed=_SEED),
        "never_drawn_pairs": draw_exam(num_pictures=settings.pictures, seed=_SEED, never_drawn="with"),
    }
    pictures: dict[str, Sequence[PictureSource]] = {
        "samples": list(map(str, sample_files())),
        "drawings": exams["plain"].pictures,
        "pairs": exams["never_drawn_pairs"].pictures,
    }
    return {
        "pictures": {name: len(files) for name, files in pictures.items()},
        "asked": {name: len(exam.questions) for name, exam in exams.items()},
        "variants": measure_variants(pictures, exams),
        "bytes": _bundle_bytes(),
        "outliers": {"size": settings.outliers, **outlier_error(settings.outliers)},
    }


def _bundle_bytes() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        made = quantise_bundle(QuantiseJob(out=str(Path(scratch) / "bundle")))
        return {
            name: sum(file.stat().st_size for file in place.glob("*.safetensors"))
            for name, place in (("float16", embedded_model()), ("int8", made))
        }


def main(arguments: Sequence[str] | None = None) -> None:
    flags = {"pictures": "fresh pictures of each kind", "outliers": "random decoder to plant them in"}
    run_bench(
        __doc__, arguments, measure=measure, page="int8", full=Settings(), quick=Settings(pictures=4), flags=flags
    )


if __name__ == "__main__":
    main()
