"""What a captioner is made of, as plain values: frozen, picklable, the one place of the defaults."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from typing import Final, Literal, get_args

Orientation = Literal["upright", "ignore"]
VisionKind = Literal["torch", "onnx", "om"]
Reading = Literal["exact", "fast"]  # of pictures: the reference's pixels to the bit, or sooner and nearly those
ReaderKind = Literal["process", "thread"]  # what reads a command's pictures
Precision = Literal["float", "int8"]
BatchSize = int | Literal["auto"]

AUTO: Final = "auto"  # of a batch size: as large as memory allows and speed asks for
DEFAULT_BATCH_SIZE = 8
DEFAULT_PICTURE_TIMEOUT_S = 60.0  # to read one picture, from disks and networks that may be slow


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionerSpec:
    """Model, device and limits. Without `model` and `llama_dir` the embedded model is meant."""

    model: str | None = None  # a bundle
    llama_dir: str | None = None  # or checkpoints as users have them
    llama_type: str | None = None
    adapter: str | None = None
    clip: str | None = None
    visual_heads: int | None = None
    channel_order: Literal["auto", "rgb", "bgr"] = "auto"
    context: int | None = None  # None: the bundle's own, else 512
    vision: VisionKind | None = None  # what runs the encoder; None: torch, or what `encoder` is a file of
    encoder: str | None = None  # exported, for onnx and om
    encoder_process: bool = False  # an exported encoder in its own process
    encoder_device: int | None = None  # of an OM; None: the decoder's, if that can run one, else the first
    device: str = "cpu"
    dtype: str = "float32"
    precision: Precision | None = None  # of the linear layers' weights; None: as the model is stored
    mode: str = "eager"  # or a graph mode of the device
    operators: Literal["auto", "aten"] = "auto"
    exif: Orientation = "upright"
    reading: Reading = "exact"
    batch_size: BatchSize = DEFAULT_BATCH_SIZE  # of a loaded captioner never `auto`

    @property
    def is_embedded(self) -> bool:
        """Whether the embedded model is meant."""
        return self.model is None and self.llama_dir is None

    @property
    def vision_kind(self) -> VisionKind:
        """What runs the encoder, as given or by the encoder's file name."""
        if self.vision is not None:
            return self.vision
        if self.encoder is None:
            return "torch"
        return "onnx" if self.encoder.lower().endswith(".onnx") else "om"

    def __post_init__(self) -> None:
        for name in ("model", "llama_dir", "llama_type", "adapter", "clip", "encoder"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a path as text, got {value!r}")
            if value == "":
                raise ValueError(f"{name} is empty: name a path, or leave it out")
        for name in ("batch_size", "context", "visual_heads"):
            value = getattr(self, name)
            if value is None or (name == "batch_size" and value == AUTO):
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.exif not in ("upright", "ignore"):
            raise ValueError(f"exif must be upright or ignore, got {self.exif!r}")
        if self.reading not in get_args(Reading):
            raise ValueError(f"reading must be exact or fast, got {self.reading!r}")
        if self.vision not in (None, *get_args(VisionKind)):
            raise ValueError(f"vision must be torch, onnx or om, got {self.vision!r}")
        if self.precision not in (None, *get_args(Precision)):
            raise ValueError(f"precision must be float or int8, got {self.precision!r}")
        if self.operators not in ("auto", "aten"):
            raise ValueError(f"operators must be auto or aten, got {self.operators!r}")
        if self.vision_kind != "torch" and self.encoder is None:
            kind = self.vision_kind
            raise ValueError(f"vision {kind} needs encoder, the file that `llama-adapter export {kind}` writes")
        if self.vision_kind == "torch" and (self.encoder is not None or self.encoder_process):
            raise ValueError("encoder and encoder_process go with vision onnx or om")
        if self.encoder_device is not None and (self.vision_kind != "om" or not 0 <= self.encoder_device <= 255):
            raise ValueError(f"encoder_device is 0 to 255 and goes with vision om, got {self.encoder_device}")
        if self.model is not None and self.llama_dir is not None:
            raise ValueError("model and llama_dir exclude each other: give a bundle, or the checkpoints it is made of")
        if self.llama_dir is None and any((self.llama_type, self.adapter, self.clip, self.visual_heads)):
            raise ValueError("llama_type, adapter, clip and visual_heads go with llama_dir, which is missing")
        if self.llama_dir is not None and not self.adapter:
            raise ValueError("llama_dir needs adapter beside it: a file such as BIAS-7B.pth")


def parse_batch_size(text: str) -> BatchSize:
    """A batch size as a flag gives it: a whole number of at least 1, or `auto`; raises ArgumentTypeError else."""
    if text.strip().lower() == AUTO:
        return AUTO
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"wanted a whole number of at least 1, or {AUTO}, got {text!r}")
    return number
