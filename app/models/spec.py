"""The specification of a captioner, as plain values. All its defaults are defined here."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.runtime.device_names import may_have_accelerator, om_device_id, split_device
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.given import real_number, require_named, require_one_of, texts, whole_number
from llama_adapter.runtime.graphs.defaults import MindirBackend
from llama_adapter.runtime.graphs.onnx_provider import split_option
from llama_adapter.runtime.schemes import FLOAT, OPERATORS, PRECISIONS, OperatorChoice, Precision
from llama_adapter.vision.formats import Damaged, Orientation, Reading, Transparency, WantedOrder

VisionKind = Literal["torch", "onnx", "om", "prefixes"]  # prefixes: no encoder, pictures are encoded already
BatchSize = int | Literal["auto"]

EXPORTED: Final = "exported"  # the mode of an exported decoder
PLAIN_MODES: Final = ("eager", EXPORTED)  # modes in which nothing is compiled before the first picture
AUTO: Final = "auto"  # a device, dtype, mode or batch size that is chosen when the model is loaded
DEFAULT_BATCH_SIZE = 8
_NAME_A_PATH: Final = "name a path, or leave it out"
_ONE_OF_BOTH: Final = "give a bundle, or the checkpoints it is made of"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionerSpec:
    """Model, device and limits. Without `model` and `llama_dir`, the model is the embedded one.

    In the spec of a loaded captioner, no device, dtype, mode or batch size is "auto". Raises ValueError for values out
    of range and for fields that exclude each other.
    """

    model: str | None = None  # a bundle; `load` takes a LLaMA too, which becomes llama_dir
    llama_dir: str | None = None  # original checkpoints, instead of a bundle; without adapter, for texts only
    llama_type: str | None = None
    adapter: str | None = None
    clip: str | None = None
    lora: Sequence[str] = ()  # PEFT folders, each FOLDER or FOLDER=WEIGHT, merged into the LLaMA's weights
    visual_heads: int | None = None
    channel_order: WantedOrder = "auto"
    context: int | None = None  # tokens; None: the bundle's own, else 512, or 2048 for chat
    prompt_template: Template | None = None  # of prompts; None: as the model was trained, else its own chat template
    past_key_values: str | None = None  # prefix tuning: a .npy file or PEFT folder, in front of every prompt
    decoder: str | None = None  # folder of an exported decoder, used instead of the model's own
    decoder_backend: MindirBackend | None = None  # what runs MindIR graphs; None: ms, MindSpore
    ge_config: str | None = None  # a `config.ini` of MindSpore Lite, for MindIR graphs on Ascend
    vision: VisionKind | None = None  # what runs the encoder; None: torch, or the kind of `encoder`
    encoder: str | None = None  # exported encoder, for onnx and om; prefix file or folder, for prefixes
    encoder_process: bool = False  # run an exported encoder in its own process
    # The number of an OM's device, or a device name. None: for an OM, the decoder's device if it can run one, else 0;
    # for ONNX, the CPU.
    encoder_device: int | str | None = None
    provider_option: Sequence[str] = ()  # key=value, for onnxruntime's execution provider
    provider_config: str | None = None  # INI file with such options
    device: str = AUTO  # the first accelerator, or the CPU
    dtype: str = AUTO  # the best dtype for the device, see number_formats.py
    precision: Precision | None = None  # of the linear layers' weights; None: as stored
    mode: str = AUTO  # eager or a graph mode of the device; auto: the graph mode of a device that records quickly
    strict: bool = False  # a graph mode that the device lacks is an error; False: steps run eager, with a note
    operators: OperatorChoice = "auto"
    tensor_parallel: int = 1  # ranks that share the decoder, each a process with its own device
    parallel_timeout: float = 60.0  # seconds that a rank waits for the others in a step
    exif: Orientation = "upright"
    transparency: Transparency = "white"
    damaged: Damaged = "refuse"
    reading: Reading = "exact"
    batch_size: BatchSize = DEFAULT_BATCH_SIZE  # "auto": as large as memory allows and speed needs

    @property
    def is_embedded(self) -> bool:
        """Whether this is the embedded model."""
        return self.model is None and self.llama_dir is None and self.decoder is None

    @property
    def is_llama_alone(self) -> bool:
        """Whether the model is a LLaMA without adapter, which answers prompts but takes no pictures."""
        return self.llama_dir is not None and self.adapter is None

    @property
    def is_on_cpu(self) -> bool:
        """Whether the CPU computes; False if a device may be found when the model is loaded."""
        return self.device == "cpu" or (self.device == AUTO and not may_have_accelerator())

    @property
    def vision_kind(self) -> VisionKind:
        """What runs the encoder: as given, or according to the encoder's file name."""
        if self.vision is not None:
            return self.vision
        if self.encoder is None:
            # Without `encoder`, an exported decoder uses the encoder in its folder.
            return "onnx" if self.decoder is not None and self.model is None and self.llama_dir is None else "torch"
        return "onnx" if self.encoder.lower().endswith(".onnx") else "om"

    @property
    def pictures(self) -> ReadingSpec:
        """How its pictures are read."""
        return ReadingSpec(
            exif=self.exif,
            transparency=self.transparency,
            damaged=self.damaged,
            reading=self.reading,
            channel_order=self.channel_order,
            prefixes=self.encoder if self.vision_kind == "prefixes" else None,
        )

    def __post_init__(self) -> None:
        self._settle_values()
        self._check_together()

    def _settle_values(self) -> None:
        """Check each value alone, and make it plain. Raises ValueError."""
        paths = ("model", "llama_dir", "llama_type", "adapter", "clip", "past_key_values", "decoder", "encoder")
        for name in (*paths, "ge_config", "provider_config"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif not isinstance(value, str | None):
                raise ValueError(f"{name} must be a path as text, got {value!r}")
            require_named(self, name, hint=_NAME_A_PATH)
        for name, other in (("batch_size", AUTO), ("context", None), ("visual_heads", None), ("tensor_parallel", 1)):
            if (value := getattr(self, name)) != other or isinstance(value, bool):
                object.__setattr__(self, name, whole_number(name, value, least=1))
        for name in ("encoder_process", "strict"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        for name, known in (
            ("exif", get_args(Orientation)),
            ("transparency", get_args(Transparency)),
            ("damaged", get_args(Damaged)),
            ("reading", get_args(Reading)),
            ("vision", (None, *get_args(VisionKind))),
            ("prompt_template", (None, *get_args(Template))),
            ("precision", (None, *PRECISIONS)),
            ("operators", tuple(OPERATORS)),
            ("decoder_backend", (None, *get_args(MindirBackend))),
        ):
            require_one_of(name, getattr(self, name), known)
        object.__setattr__(self, "provider_option", texts("provider_option", self.provider_option))
        object.__setattr__(self, "parallel_timeout", real_number("parallel_timeout", self.parallel_timeout))
        if not 0 < self.parallel_timeout < 1e6:
            raise ValueError(f"parallel_timeout must be a number of seconds above 0, got {self.parallel_timeout!r}")
        object.__setattr__(self, "lora", _folders(self.lora))

    def _check_together(self) -> None:
        """Raise ValueError for values that exclude or lack each other, or that the encoder does not take."""
        kind = self.vision_kind
        if kind != "torch" and self.encoder is None and (self.decoder is None or kind == "prefixes"):
            maker = "encode" if kind == "prefixes" else f"export {kind}"
            raise ValueError(f"vision {kind} needs encoder, the file that `llama-adapter {maker}` writes")
        if self.vision_kind == "torch" and (self.encoder is not None or self.encoder_process):
            raise ValueError("encoder and encoder_process go with vision onnx or om")
        if self.encoder_device is not None:
            self._check_encoder_device(self.encoder_device)
        if (
            self.vision_kind != "onnx"
            and self.decoder is None
            and (self.provider_option or self.provider_config is not None)
        ):
            raise ValueError("provider_option and provider_config go with vision onnx")
        for text in self.provider_option:
            split_option(text)
        if self.lora and self.decoder is not None:
            raise ValueError("lora and decoder exclude each other: merge the LoRA by `convert`, then export again")
        if self.model is not None and self.llama_dir is not None:
            raise ValueError(f"model and llama_dir exclude each other: {_ONE_OF_BOTH}")
        if self.llama_dir is None and any((self.llama_type, self.adapter, self.clip, self.visual_heads)):
            error = ValueError("llama_type, adapter, clip and visual_heads go with llama_dir, which is missing")
            if self.adapter is not None:
                error.add_note("for an adapter that train wrote over a bundle, name its run's folder `bundle` as model")
            raise error
        if self.decoder is not None and (
            self.precision is not None or self.mode not in (AUTO, "eager") or self.operators != "auto"
        ):
            raise ValueError("with decoder, the export decides on precision, mode and operators: leave them out")
        precision = FLOAT if self.precision is None and self.llama_dir is not None else self.precision
        if self.operators == "w8a8" and precision not in (None, "int8"):
            raise ValueError(f"operators w8a8 goes with precision int8, and it is {precision}")
        if self.tensor_parallel > 1 and self.decoder is not None:
            raise ValueError("tensor_parallel and decoder exclude each other: an export is one graph")
        if self.strict and self.tensor_parallel > 1 and self.mode not in (AUTO, "eager"):
            raise ValueError(
                f"tensor_parallel goes with mode eager, and it is {self.mode}: no graph holds the sums over ranks. "
                "Pass mode eager, or one rank"
            )
        if self.decoder is None and (self.decoder_backend or self.ge_config):
            raise ValueError("decoder_backend and ge_config go with decoder, which is missing")
        if self.is_llama_alone and (self.clip or self.visual_heads):
            raise ValueError("clip and visual_heads go with adapter, which is missing")

    def _check_encoder_device(self, device: int | str) -> None:
        """Raise ValueError for a device that does not run this kind of encoder."""
        if self.vision_kind == "torch":
            raise ValueError("encoder_device goes with vision onnx or om")
        try:
            if self.vision_kind == "om":
                om_device_id(device)
            else:
                split_device(str(device))
        except ValueError as error:
            raise ValueError(f"encoder_device for vision {self.vision_kind}: {error}") from None


def tokens_error(name: str) -> UsageError:
    """The refusal to write prefix files with a model that sees pictures as tokens."""
    return UsageError(
        f"`{name}` sees pictures as tokens of its prompts, and prefix files hold none",
        hint="name its folder as --model where pictures are asked about",
    )


def _folders(given: Sequence[str] | str | os.PathLike[str]) -> tuple[str, ...]:
    """The texts FOLDER[=WEIGHT] of one or several LoRA. Raises ValueError for other values."""
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    texts = tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in several)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"lora must be folders, each as a path or as FOLDER=WEIGHT, got {given!r}")
    return texts


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSources:
    """Where an encoder's weights are: an adapter with its CLIP, else a model: a bundle, a LLaMA, the embedded one."""

    model: str | None = None
    llama_dir: str | None = None  # of a model that sees pictures as tokens; not read if there is an adapter
    llama_type: str | None = None
    adapter: str | None = None
    clip: str | None = None
    visual_heads: int | None = None
    channel_order: WantedOrder = "auto"

    def __post_init__(self) -> None:
        for name in ("adapter", "llama_dir"):
            if self.model is not None and getattr(self, name) is not None:
                raise ValueError(f"model and {name} exclude each other: {_ONE_OF_BOTH}")
        if self.adapter is None and (self.clip is not None or self.visual_heads is not None):
            raise ValueError("clip and visual_heads go with adapter, which is missing")
        if self.adapter is None and self.llama_dir is None and self.llama_type is not None:
            raise ValueError("llama_type goes with llama_dir, which is missing")
        require_named(self, "model", "llama_dir", "llama_type", "adapter", "clip", hint=_NAME_A_PATH)

    @property
    def whole(self) -> CaptionerSpec:
        """The model, if there is no adapter."""
        names = ("model", "llama_dir", "llama_type", "channel_order")
        return CaptionerSpec(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The description of a loaded model, for reports and records."""

    name: str
    digest: str
    device: str
    dtype: str
    precision: Precision  # of the linear layers' weights; everything else has `dtype`
    vision: str  # what runs the encoder
    mode: str  # how the steps of the decoder are run
    operators: str
    encoder: str | None  # identity of an exported encoder; None: the model's own weights
    context: int  # tokens of prompt and answer together
    default_prompt: str  # the prompt for captions
    notes: tuple[str, ...] = ()  # for the user, on what may be unexpected about the model
    has_adapter: bool = True  # False: LLaMA alone or with an adapter for texts; takes no pictures
    has_text_adapter: bool = False  # of LLaMA-Adapter V1
    template: Template = "instruction"  # of its prompts
    template_id: str | None = None  # in records: a template that was asked for, or the model's own for chats
    past: str | None = None  # digest of the past keys and values
    card: str = ""  # what its weights are, and their licences, as far as known
    picture_format: PictureFormat | None = None  # how pictures stand in prompts, if they are tokens of them

    @property
    def sees_pictures(self) -> bool:
        """Whether it takes pictures: through an adapter, or as tokens of the prompt."""
        return self.has_adapter or self.picture_format is not None

    @property
    def has_turns(self) -> bool:
        """Whether the template of prompts has earlier turns of a conversation."""
        return self.template != "instruction"

    @property
    def sees_earlier(self) -> bool:
        """Whether each question of a chat has the earlier ones; a picture for an adapter belongs to one question."""
        return self.has_turns and not self.has_adapter

    def require_sight(self) -> None:
        """Raise UsageError if the model takes no pictures: LLaMA alone, or with an adapter for texts."""
        if self.has_text_adapter or (self.template == "conversation" and not self.sees_pictures):
            kind = "LLaMA-Adapter V1 for texts" if self.has_text_adapter else "LLaMA-Adapter V2 for chat"
            raise UsageError(
                f"The adapter `{self.name}` is one of {kind}, and sees no pictures",
                hint="`llama-adapter generate` answers prompts with it",
            )
        if not self.sees_pictures:
            raise UsageError(
                f"`{self.name}` is a LLaMA without adapter, and sees no pictures",
                hint="pass an adapter beside llama_dir, such as BIAS-7B.pth; texts are answered without",
            )

    def text_prefix(self, wanted: TextPrefix | None = None) -> TextPrefix:
        """What a prompt without a picture attends to; by default as in the model's training.

        LLaMA-Adapter V2 is trained with a picture of zeros for examples without a picture. Raises ValueError for a
        prefix that the model does not have.
        """
        if wanted == "zeros" and not self.has_adapter:
            raise ValueError("text_prefix zeros needs a model with adapter")
        if wanted == "learned" and not self.has_text_adapter:
            raise ValueError("text_prefix learned needs an adapter for texts, of LLaMA-Adapter V1")
        require_one_of("text_prefix", wanted, (None, *get_args(TextPrefix)))
        return wanted or ("zeros" if self.has_adapter else "learned" if self.has_text_adapter else "none")
