"""What is said of a model beside its weights: sizes, tokenizer, prompts. Imports no torch."""

from dataclasses import dataclass

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.out_of_distribution import OodDetector

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
    ood_detector: OodDetector | None = None  # detects pictures unlike the training data
    notes: tuple[str, ...] = ()  # sentences for the user about the source files
    picture_format: PictureFormat | None = None  # how pictures stand in prompts, if they are tokens of them
