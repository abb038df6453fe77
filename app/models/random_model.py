"""Models of any size with random weights: they answer nonsense at the speed of real ones. Nothing is read but the
embedded model's tokenizer."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sentencepiece
import torch
from torch import Tensor

from llama_adapter.app.models.checkpoints import DEFAULT_CONTEXT, LoadedModel
from llama_adapter.app.models.quantising import linear_weights, quantise
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import Precision
from llama_adapter.app.models.tensor_files import expected_forms, sketch
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.devices.backend import open_backend
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.vision.config import ChannelOrder, ClipConfig, QueryConfig, VisionConfig

VOCABULARY = 32000
NUM_QUERIES = 10
_NUM_DRAWN = 1_048_573  # a prime, so that repeating the numbers makes no two rows of a matrix alike


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSize:
    """Sizes of a LLaMA that differ between models."""

    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int


# 160M and 1B are JackFram/llama-160m and TinyLlama-1.1B in size (the latter with all its heads), 7B is LLaMA-7B.
LLAMA_SIZES: Mapping[str, LlamaSize] = {
    "tiny": LlamaSize(dim=64, num_layers=3, num_heads=4, ffn_dim=176),
    "160M": LlamaSize(dim=768, num_layers=12, num_heads=12, ffn_dim=3072),
    "1B": LlamaSize(dim=2048, num_layers=22, num_heads=16, ffn_dim=5632),
    "7B": LlamaSize(dim=4096, num_layers=32, num_heads=32, ffn_dim=11008),
}
_VIT_L_14 = ClipConfig(patch_size=14, width=1024, num_layers=24, num_heads=16, output_dim=768)
_TINY_CLIP = ClipConfig(patch_size=56, width=64, num_layers=2, num_heads=2, output_dim=64)


def parse_size(text: str) -> LlamaSize:
    """A size by its name, or as DIMxLAYERSxHEADSxFFN; raises ValueError for anything else."""
    by_name = {name.lower(): size for name, size in LLAMA_SIZES.items()}
    if text.lower() in by_name:
        return by_name[text.lower()]
    if re.fullmatch(r"\d+x\d+x\d+x\d+", text) is None:
        raise ValueError(f"random must be one of {', '.join(LLAMA_SIZES)}, or DIMxLAYERSxHEADSxFFN, got {text!r}")
    dim, num_layers, num_heads, ffn_dim = map(int, text.split("x"))
    return LlamaSize(dim=dim, num_layers=num_layers, num_heads=num_heads, ffn_dim=ffn_dim)


def decoder_config(size: LlamaSize, *, context: int | None = None) -> DecoderConfig:
    """The decoder of that size, with an adapter in all layers but the first; raises ValueError for odd sizes."""
    return DecoderConfig(
        vocab_size=VOCABULARY,
        dim=size.dim,
        num_layers=size.num_layers,
        num_heads=size.num_heads,
        ffn_dim=size.ffn_dim,
        norm_eps=1e-6,
        context=DEFAULT_CONTEXT if context is None else context,
        num_adapter_layers=size.num_layers - 1,
        num_queries=NUM_QUERIES,
    )


def vision_config(size: LlamaSize, *, channel_order: ChannelOrder = "rgb") -> VisionConfig:
    """ViT-L/14 and the released adapters' visual blocks in front of a LLaMA of that size; tiny ones before tiny."""
    is_tiny = size == LLAMA_SIZES["tiny"]
    width = 64 if is_tiny else 768
    return VisionConfig(
        clip=_TINY_CLIP if is_tiny else _VIT_L_14,
        query=QueryConfig(
            num_queries=NUM_QUERIES,
            width=width,
            depth=2 if is_tiny else 8,
            num_heads=2 if is_tiny else 16,
            mlp_dim=4 * width,
            output_dim=size.dim,
        ),
        channel_order=channel_order,
    )


def random_model(
    name: str,
    *,
    dtype: torch.dtype,
    context: int | None = None,
    channel_order: ChannelOrder = "rgb",
    precision: Precision = "float",
    vision: VisionConfig | None = None,
) -> LoadedModel:
    """The model of a size as `parse_size` takes it, in `dtype` on the CPU; the same numbers at every call.

    `vision` is the encoder's sizes, in place of those that `vision_config` gives, with its channel order. With the
    precision int8, each weight is quantised as it is made. With greedy decoding the model never says the end
    token. Raises ValueError for sizes that make no model, and DeviceError, before anything is drawn, for one larger
    than the host's memory.
    """
    size = parse_size(name)
    decoder = decoder_config(size, context=context)
    vision = vision_config(size, channel_order=channel_order) if vision is None else vision
    tokenizer = WiderTokenizer.around(embedded_model() / "tokenizer.model", vocab_size=decoder.vocab_size)
    _check_host(decoder, vision, dtype=dtype, precision=precision, name=name)
    decoder_state = _drawn_state(decoder, dtype=dtype, precision=precision)
    decoder_state["adapter.gates"].fill_(0.5)
    # Its logit is 0, and the greatest of thousands of random ones is above it.
    decoder_state["head.weight"][tokenizer.eos_id] = 0.0
    return LoadedModel(
        name=f"random {name}",
        digest=f"random-{name}",
        vision_config=vision,
        vision_state=_drawn_state(vision, dtype=dtype, precision=precision),
        decoder_config=decoder,
        decoder_state=decoder_state,
        tokenizer=tokenizer,
        dtype=dtype,
        sources=(),
        merged=("gates",),
        precision=precision,
    )


def _drawn_state(
    config: DecoderConfig | VisionConfig, *, dtype: torch.dtype, precision: Precision
) -> dict[str, Tensor]:
    module = sketch(config)
    tensors = random_tensors(module.state_dict(), dtype=dtype)
    if precision == "float":
        return dict(tensors)
    return dict(quantise(tensors, linears=linear_weights(module), dtype=dtype))


def random_state(sketch: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state dict of `random_tensors`."""
    return dict(random_tensors(sketch, dtype=dtype))


def random_tensors(sketch: Mapping[str, Tensor], *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the names and shapes of `sketch`: normal weights that keep the size of what they multiply.

    Scales are 1, biases 0. A million numbers are drawn and repeated, which is as fast as copying.
    """
    drawn = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0)).to(dtype)
    num_used = 0
    for name, tensor in sketch.items():
        values = torch.empty(tensor.shape, dtype=dtype)
        if tensor.ndim == 1 and name.endswith("weight"):
            values.fill_(1.0)
        elif name.endswith("bias"):
            values.zero_()
        else:
            # Each tensor begins elsewhere, or layers of one shape would be equal.
            _repeat(drawn.roll(-num_used), into=values)
            values.mul_(_std(name, tensor))
            num_used += tensor.numel()
        yield name, values


def _repeat(drawn: Tensor, *, into: Tensor) -> None:
    flat, size = into.view(-1), len(drawn)
    for start in range(0, len(flat), size):
        part = flat[start : start + size]
        part.copy_(drawn[: len(part)])


def _check_host(*configs: DecoderConfig | VisionConfig, dtype: torch.dtype, precision: Precision, name: str) -> None:
    forms = [expected_forms(config, dtype=dtype, precision=precision) for config in configs]
    needed = sum(form.num_bytes for half in forms for form in half.values())
    free = open_backend("cpu").free_bytes()
    if free is not None and needed > free:
        raise DeviceError(
            f"The weights of a random {name} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on the host",
            hint="try a smaller size, or a half --dtype",
        )


def _std(name: str, tensor: Tensor) -> float:
    """1 over the root of the inputs for matrices, less where the product is added to the residual; as trained else."""
    if name == "embedding.weight" or name.endswith("query.queries"):
        return 1.0
    if tensor.ndim == 1 or "position_embedding" in name:
        return float(tensor.shape[-1] ** -0.5)
    if name == "adapter.queries":
        return 0.02
    is_added = re.search(r"\.(out|down)\.weight$", name) is not None
    return float(math.prod(tensor.shape[1:]) ** -0.5) * (0.2 if is_added else 1.0)


class WiderTokenizer(Tokenizer):
    """A tokenizer with more ids than it has pieces: those above stand for its pieces over again, so that they are text.

    Texts are encoded as by the tokenizer inside.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, data: bytes, *, vocab_size: int) -> None:
        super().__init__(processor, data)
        self._num_pieces = self.vocab_size
        self.vocab_size = max(vocab_size, self._num_pieces)
        self._texts = [
            piece
            for piece in range(self._num_pieces)
            if not (processor.is_byte(piece) or processor.is_control(piece) or processor.is_unknown(piece))
        ]

    @classmethod
    def around(cls, path: object, *, vocab_size: int) -> "WiderTokenizer":
        """Around the `tokenizer.model` at `path`; raises CheckpointError as `Tokenizer.load`."""
        inner = Tokenizer.load(str(path))
        return cls(inner._processor, inner.data, vocab_size=vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        self._check(map(int, ids))
        return super().decode([self._known(int(piece)) for piece in ids])

    def _known(self, piece: int) -> int:
        if piece < self._num_pieces:
            return piece
        return self._texts[(piece - self._num_pieces) % len(self._texts)]
