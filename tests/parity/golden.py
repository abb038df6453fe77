"""The reference's data, its checkpoints as a user gives them, and our models built from them."""

import copy
import functools
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.meta import open_meta
from llama_adapter.vision.encoder import PictureEncoder, encoder_from_state
from llama_adapter.vision.towers import read_clip
from llama_adapter.vision.weights import build_vision
from tests.bounds import Float64, rounding_module, spread
from tests.llm.toys import build_decoder

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text())
GENERATE: dict[str, dict[str, Any]] = {case["name"]: case for case in CASES["generate"]}
PICTURES: list[str] = CASES["visual_order"]
# Cases with the same model and the same limits, which one call can answer together; their prompts differ in length.
GROUPS: dict[str, list[dict[str, Any]]] = {}
for _case in GENERATE.values():
    GROUPS.setdefault("{adapter}-{max_gen_len}-{max_seq_len}".format_map(_case), []).append(_case)
ADAPTERS = tuple(CASES["adapters"])


class GoldenModel(NamedTuple):
    encoder: PictureEncoder
    decoder: LlamaAdapterDecoder


def batch(group: str, *, num_rows: int) -> dict[str, Any]:
    """The rows of a group's cases as one case. Rows are repeated from the first one until there are `num_rows`."""
    cases, columns = GROUPS[group], ("images", "prompts", "output_ids", "output_text")
    rows = {name: [row for case in cases for row in case[name]] for name in columns}
    num_rows = max(num_rows, len(rows["images"]))
    return cases[0] | {name: list(itertools.islice(itertools.cycle(all), num_rows)) for name, all in rows.items()}


def tensors(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / "data" / f"{name}.safetensors")


def pixels(pictures: list[str]) -> Tensor:
    """The reference's pixels after resize and crop, uint8 (B, 224, 224, 3)."""
    files = [GOLDEN / "preprocessed" / f"{Path(picture).stem}.png" for picture in pictures]
    return torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))


@functools.cache
def model(
    adapter: str, *, dtype: torch.dtype = torch.float32, channel_order: Any = "rgb", device: str = "cpu"
) -> GoldenModel:
    opened = open_adapter(GOLDEN / "adapters" / f"{adapter}.pth")
    separate = GOLDEN / "CLIP/tiny-vit-torchscript.pt"
    clip = read_clip(opened.clip, name=adapter) if opened.clip else open_clip(separate)
    vision_config, vision_state = build_vision(
        opened.visual, name=adapter, clip=clip, visual_heads=4, channel_order=channel_order, dtype=dtype
    )
    config, state = decoder_state(adapter=adapter, dtype=dtype)
    encoder, decoder = encoder_from_state(vision_config, vision_state), decoder_from_state(config, state)
    return GoldenModel(encoder.to(device), decoder.to(device))


@functools.cache
def exact_model(adapter: str, *, channel_order: Any = "rgb") -> GoldenModel:
    """The model in float64; it computes in it inside `Float64`."""
    encoder, decoder = model(adapter, channel_order=channel_order)
    return GoldenModel(copy.deepcopy(encoder).double(), copy.deepcopy(decoder).double())


@functools.cache
def measured_model(adapter: str, *, dtype: torch.dtype = torch.float32, channel_order: Any = "rgb") -> GoldenModel:
    """The model whose distance from `exact_model` is the measure for other programs in `dtype`."""
    encoder, decoder = model(adapter, channel_order=channel_order)
    if dtype == torch.float32:
        return GoldenModel(encoder, decoder)
    return GoldenModel(rounding_module(encoder, dtype), rounding_module(decoder, dtype))


@functools.cache
def query_limit(adapter: str, *, dtype: torch.dtype = torch.float32, channel_order: Any = "rgb") -> float:
    """How far apart the visual queries of `PICTURES` by two programs in `dtype` may be."""
    measured = measured_model(adapter, dtype=dtype, channel_order=channel_order)
    with Float64():
        exact = exact_model(adapter, channel_order=channel_order).encoder(pixels(PICTURES))
    return spread(measured.encoder(pixels(PICTURES)), exact)


def decoder_state(
    *, adapter: str | None, dtype: torch.dtype = torch.float32
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    opened = None if adapter is None else open_adapter(GOLDEN / "adapters" / f"{adapter}.pth")
    return build_decoder(open_meta(GOLDEN / "LLaMA/TINY"), opened, dtype=dtype)


def model_options(adapter: str = "BIAS-TINY", *, llama_type: str = "TINY") -> dict[str, Any]:
    """The arguments of `Captioner.load`."""
    return {
        "llama_dir": str(GOLDEN / "LLaMA"),
        "llama_type": llama_type,
        "adapter": str(GOLDEN / "adapters" / f"{adapter}.pth"),
        "clip": str(GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"),
        "visual_heads": 4,
    }


def model_flags(adapter: str = "BIAS-TINY", *, llama_type: str = "TINY") -> list[str]:
    """The flags of the command line."""
    options = model_options(adapter, llama_type=llama_type)
    return [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]


def picture(name: str = "shapes_200x300.jpg") -> str:
    """The path of a golden picture."""
    return str(GOLDEN / "images" / name)
