"""Models of any size with random weights, for measurements. Only the embedded model's tokenizer is read from disk."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from llama_adapter.app.models.checkpoints import DEFAULT_CONTEXT, LoadedModel, StreamedModel, whole
from llama_adapter.app.models.number_formats import Dtype, dtype_of
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.sketch import HalfConfig, expected_forms, sketch
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.pieces.sentence_pieces import SentencePieces
from llama_adapter.llm.split import share_of, take_all
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.devices import open_backend
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.runtime.schemes.state import linear_precisions, new_finer_weights
from llama_adapter.vision.config import VIT_L_14, ChannelOrder, ClipConfig, QueryConfig, VisionConfig

VOCABULARY = 32000
NUM_QUERIES = 10
_NUM_DRAWN = 1_048_573  # a prime, so that repeated numbers do not make two rows of a matrix equal


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSize:
    """Sizes of a LLaMA."""

    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    num_kv_heads: int = 0  # as in `DecoderConfig`
    vocab_size: int = VOCABULARY


# 160M and 1B have the sizes of JackFram/llama-160m and TinyLlama-1.1B (the latter without grouped-query attention).
# Those up to 65B are the first LLaMAs (Touvron et al., 2023); papers call 30B 33B. The others have the sizes of the
# published models with these names, and heads that share keys and values. Embedding and head are two tensors in all.
LLAMA_SIZES: Mapping[str, LlamaSize] = {
    "tiny": LlamaSize(dim=64, num_layers=3, num_heads=4, ffn_dim=176),
    "160M": LlamaSize(dim=768, num_layers=12, num_heads=12, ffn_dim=3072),
    "1B": LlamaSize(dim=2048, num_layers=22, num_heads=16, ffn_dim=5632),
    "7B": LlamaSize(dim=4096, num_layers=32, num_heads=32, ffn_dim=11008),
    "13B": LlamaSize(dim=5120, num_layers=40, num_heads=40, ffn_dim=13824),
    "30B": LlamaSize(dim=6656, num_layers=60, num_heads=52, ffn_dim=17920),
    "65B": LlamaSize(dim=8192, num_layers=80, num_heads=64, ffn_dim=22016),
    "SmolLM2-135M": LlamaSize(dim=576, num_layers=30, num_heads=9, num_kv_heads=3, ffn_dim=1536, vocab_size=49152),
    "SmolLM2-360M": LlamaSize(dim=960, num_layers=32, num_heads=15, num_kv_heads=5, ffn_dim=2560, vocab_size=49152),
    "Qwen2.5-0.5B": LlamaSize(dim=896, num_layers=24, num_heads=14, num_kv_heads=2, ffn_dim=4864, vocab_size=151936),
    "TinyLlama": LlamaSize(dim=2048, num_layers=22, num_heads=32, num_kv_heads=4, ffn_dim=5632),
    "Llama-3.2-1B": LlamaSize(dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192, vocab_size=128256),
    "Llama-3.2-3B": LlamaSize(dim=3072, num_layers=28, num_heads=24, num_kv_heads=8, ffn_dim=8192, vocab_size=128256),
    "Llama-3.1-8B": LlamaSize(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, vocab_size=128256),
}
_TINY_CLIP = ClipConfig(patch_size=56, width=64, num_layers=2, num_heads=2, output_dim=64)


def parse_size(text: str) -> LlamaSize:
    """A size, given by its name or as DIMxLAYERSxHEADSxFFN. Raises ValueError for anything else."""
    by_name = {name.lower(): size for name, size in LLAMA_SIZES.items()}
    if text.lower() in by_name:
        return by_name[text.lower()]
    if re.fullmatch(r"\d+x\d+x\d+x\d+", text) is None:
        raise ValueError(f"random must be one of {', '.join(LLAMA_SIZES)}, or DIMxLAYERSxHEADSxFFN, got {text!r}")
    dim, num_layers, num_heads, ffn_dim = map(int, text.split("x"))
    return LlamaSize(dim=dim, num_layers=num_layers, num_heads=num_heads, ffn_dim=ffn_dim)


def decoder_config(size: LlamaSize, *, context: int | None = None) -> DecoderConfig:
    """The decoder of this size, with an adapter in all layers but the first. Raises ValueError for invalid sizes."""
    return DecoderConfig(
        **asdict(size),
        norm_eps=1e-6,
        context=DEFAULT_CONTEXT if context is None else context,
        num_adapter_layers=size.num_layers - 1,
        num_queries=NUM_QUERIES,
    )


def vision_config(size: LlamaSize, *, channel_order: ChannelOrder = "rgb") -> VisionConfig:
    """ViT-L/14 and the released adapters' visual blocks, for a LLaMA of this size; for size tiny, tiny ones."""
    is_tiny = size == LLAMA_SIZES["tiny"]
    width = 64 if is_tiny else 768
    return VisionConfig(
        clip=_TINY_CLIP if is_tiny else VIT_L_14,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomLoader:
    """Makes the same random model of a size (see `parse_size`) on the CPU at every call and in every process."""

    name: str
    context: int | None = None
    channel_order: ChannelOrder = "rgb"
    precision: Precision = FLOAT
    vision: VisionConfig | None = None  # in place of the encoder's sizes of `vision_config` and `channel_order`

    def __call__(self, dtype: Dtype, ranks: Alone = ALONE) -> StreamedModel:
        """The model in `dtype`; the tensors of the decoder are made one by one. Greedy decoding never selects the end.

        With `ranks`, the decoder's tensors are this rank's share; each matrix is drawn whole, then divided. Raises
        ValueError for invalid sizes. Raises DeviceError, before any number is drawn, for a model larger than the host's
        memory.
        """
        size, precision = parse_size(self.name), self.precision
        decoder = decoder_config(size, context=self.context)
        vision = self.vision or vision_config(size, channel_order=self.channel_order)
        dtype = dtype_of(dtype, decoder=decoder, encoder=sketch(vision).state_dict().values(), precision=precision)
        tokenizer = WiderTokenizer(decoder.vocab_size)
        _check_host(decoder, vision, dtype=dtype, precision=precision, name=self.name)
        model = LoadedModel(
            name=f"random {self.name}",
            digest=f"random-{self.name}",
            vision_config=vision,
            vision_state=dict(_drawn(vision, dtype=dtype, precision=precision)),
            decoder_config=decoder,
            decoder_state={},
            tokenizer=tokenizer,
            dtype=dtype,
            sources=(),
            merged=("gates",),
            precision=precision,
            finer_weights=new_finer_weights(sketch(decoder), precision),
        )
        tensors = _drawn(decoder, dtype=dtype, precision=precision, eos_id=tokenizer.eos_id)
        share = share_of(decoder, ranks)
        return model, tensors if share is decoder else take_all(tensors, whole=decoder, share=share)


def random_model(
    name: str, *, dtype: Dtype, precision: Precision = FLOAT, vision: VisionConfig | None = None
) -> LoadedModel:
    """The whole model of a `RandomLoader`, whose errors are raised."""
    return whole(RandomLoader(name=name, precision=precision, vision=vision))(dtype)


def _drawn(config: HalfConfig, *, precision: Precision, **options: Any) -> Iterator[tuple[str, Tensor]]:
    module = sketch(config)
    precisions = None if precision == FLOAT else linear_precisions(module, precision)
    return random_tensors(module.state_dict(), precisions=precisions, **options)


def random_tensors(
    sketch: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    eos_id: int | None = None,
    precisions: Mapping[str, Precision] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the names and shapes of `sketch`: normally distributed weights that keep the scale of activations.

    Norm weights are 1, biases 0, gates 0.5. The logit of `eos_id` is 0: the largest of thousands of random logits is
    positive, so greedy decoding never selects it. About a million numbers are drawn and repeated, which is as fast as
    copying. They are the same on every device; without one, the tensors are on the CPU. Weights with an entry in
    `precisions` are quantised to it, some rows at a time, so that no whole matrix is in memory as floats.
    """
    numbers = torch.randn(_NUM_DRAWN, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    first = 0  # each tensor starts at another number; otherwise layers of the same shape would be equal
    for name, tensor in sketch.items():
        if precisions and name in precisions:
            scheme = find_scheme(precisions[name])
            num_rows = max(_NUM_DRAWN // tensor.shape[1], 1)
            parts = [range(start, min(start + num_rows, len(tensor))) for start in range(0, len(tensor), num_rows)]
            pieces = [scheme.quantise(_rows(name, tensor, part, numbers, first, eos_id)) for part in parts]
            for suffix in scheme.suffixes:
                yield name + suffix, torch.cat([piece[suffix] for piece in pieces])
        else:
            yield name, _rows(name, tensor, range(len(tensor)), numbers, first, eos_id)
        first += 0 if _is_constant(name, tensor) else tensor.numel()


def _rows(name: str, tensor: Tensor, rows: range, numbers: Tensor, first: int, eos_id: int | None) -> Tensor:
    """Some rows of a tensor whose numbers begin at the one of number `first`."""
    values = torch.empty((len(rows), *tensor.shape[1:]), dtype=numbers.dtype, device=numbers.device)
    if name == "adapter.gates":
        return values.fill_(0.5)
    if _is_constant(name, tensor):
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    flat, done = values.view(-1), 0
    first += rows.start * math.prod(tensor.shape[1:])
    while done < len(flat):
        part = numbers[(first + done) % _NUM_DRAWN :][: len(flat) - done]
        flat[done : done + len(part)] = part
        done += len(part)
    if name == "head.weight" and eos_id is not None and eos_id in rows:
        values[rows.index(eos_id)] = 0.0
    return values.mul_(_std(name, tensor))


def _is_constant(name: str, tensor: Tensor) -> bool:
    return name.endswith("bias") or (tensor.ndim == 1 and name.endswith("weight"))


def _check_host(*configs: HalfConfig, dtype: torch.dtype, precision: Precision, name: str) -> None:
    forms = [expected_forms(config, dtype=dtype, precision=precision) for config in configs]
    needed = sum(form.num_bytes for half in forms for form in half.values())
    free = open_backend("cpu").free_bytes()
    if free is not None and needed > free:
        raise DeviceError(
            f"The weights of a random {name} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on the host",
            hint="try a smaller size, or a 16-bit --dtype",
        )


def _std(name: str, tensor: Tensor) -> float:
    """Standard deviation: 1 / sqrt(inputs) for matrices, less if the output is added to the residual stream.

    Other tensors have the standard deviation of their initialisation in training.
    """
    if name == "embedding.weight" or name.endswith("query.queries"):
        return 1.0
    if tensor.ndim == 1 or "position_embedding" in name:
        return float(tensor.shape[-1] ** -0.5)
    if name == "adapter.queries":
        return 0.02
    is_added = re.search(r"\.(out|down)\.weight$", name) is not None
    return float(math.prod(tensor.shape[1:]) ** -0.5) * (0.2 if is_added else 1.0)


class WiderTokenizer(Tokenizer):
    """The embedded model's tokenizer with `vocab_size` ids. Ids beyond its pieces are decoded as its last piece."""

    def __init__(self, vocab_size: int) -> None:
        data = (embedded_model() / SentencePieces.file_name).read_bytes()
        super().__init__(_WiderPieces(data, vocab_size), data)


class _WiderPieces(SentencePieces):
    def __init__(self, data: bytes, vocab_size: int) -> None:
        super().__init__(data, name=SentencePieces.file_name)
        self._last = self.num_ids - 1
        self.num_ids = max(vocab_size, self.num_ids)

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([min(piece, self._last) for piece in ids])
