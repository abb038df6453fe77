"""What is said of a model beside its weights: sizes, tokenizer, prompts. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from llama_adapter.app.models.bundle_manifest import DAMAGED, FAMILIAR, Manifest
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import FLOAT, Precision, finer
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.out_of_distribution import OodDetector, read_familiarity

DEFAULT_PROMPT = "Generate caption of this image"  # the instruction used in the caption pre-training of the adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedModel:
    """A model without its weights.

    `digest` identifies it in records: the bundle's digest, or a digest of names, sizes and times of the source files.
    """

    name: str
    digest: str
    vision_config: VisionConfig
    decoder_config: DecoderConfig
    tokenizer: Tokenizer
    prompt: str = DEFAULT_PROMPT  # for captions
    question: str | None = None  # that it learned for all other examples; None: it learned none, or several
    template: Template = "instruction"  # of prompts
    card: str = ""  # what the weights are, and their licences
    precision: Precision = FLOAT  # of the linear layers' weights
    has_finer: bool = True  # whether some weights are finer beside those of 4 bits; not in older bundles
    ood_detector: OodDetector | None = None  # detects pictures unlike the training data
    notes: tuple[str, ...] = ()  # sentences for the user about the source files
    picture_format: PictureFormat | None = None  # how pictures stand in prompts, if they are tokens of them


def described(manifest: Manifest, decoder: DecoderConfig) -> dict[str, Any]:
    """The fields of a `DescribedModel` that a bundle gives in its own words and files.

    Raises CheckpointError for damaged files, and for a tokenizer of another model.
    """
    tokenizer, detector = Tokenizer.load_stored(manifest.place, manifest["files"]), None
    if tokenizer.vocab_size != decoder.vocab_size:
        raise CheckpointError(
            f"The bundle `{manifest.place}` has a tokenizer of {tokenizer.vocab_size} pieces for a model of "
            f"{decoder.vocab_size} tokens",
            hint=DAMAGED,
        )
    if FAMILIAR in manifest["files"]:
        familiar = manifest.place / FAMILIAR
        detector = read_familiarity(familiar, num_queries=decoder.num_queries, width=decoder.dim)
    return {
        **{name: str(manifest[name]) for name in ("name", "prompt", "card")},
        "question": manifest.get("question"),
        "template": manifest.get("template", "instruction"),
        "picture_format": manifest.picture_format,
        "has_finer": manifest.finest == finer(manifest.precision),
        "tokenizer": tokenizer,
        "ood_detector": detector,
    }
