"""Converts the tensors of CLIP and adapter files to the encoder's configuration and state dict."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import (
    check_dense,
    check_names,
    check_shapes,
    count_blocks,
    list_keys,
    what_is,
)
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.config import ChannelOrder, ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import PictureEncoder

CLIP_HEAD_DIM = 64  # in all CLIP models of OpenAI
KNOWN_VISUAL_HEADS = {768: 16}  # width of the visual blocks -> number of heads, which no file stores

Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """The names of a module's tensors in a file, from tensor_names.toml: our name -> the file's name."""

    tensors: Mapping[str, str]
    parts: Mapping[str, str]  # each with a weight and a bias
    blocks: str  # the file's prefix of numbered blocks
    block_parts: Mapping[str, str]
    qkv: Sequence[str]  # the file's parts of the packed projection; `{}` stands for weight or bias

    def names(self, num_blocks: int) -> Names:
        """Our name -> the file's names of all tensors.

        Several tensors of the file are concatenated along their rows.
        """
        names: Names = {ours: (theirs,) for ours, theirs in self.tensors.items()}
        for kind in ("weight", "bias"):
            names |= {f"{ours}.{kind}": (f"{theirs}.{kind}",) for ours, theirs in self.parts.items()}
            for block in range(num_blocks):
                ours_prefix, prefix = f"blocks.{block}.", f"{self.blocks}{block}."
                names[f"{ours_prefix}attention.qkv.{kind}"] = tuple(prefix + part.format(kind) for part in self.qkv)
                for ours, theirs in self.block_parts.items():
                    names[f"{ours_prefix}{ours}.{kind}"] = (f"{prefix}{theirs}.{kind}",)
        return names


_LAYOUTS = {
    file: _Layout(**names)
    for file, names in tomllib.loads(Path(__file__).with_name("tensor_names.toml").read_text(encoding="utf-8")).items()
}
_OPENAI, _HUGGINGFACE, _QUERY = (_LAYOUTS[file] for file in ("openai", "huggingface", "query"))
# Tensors of CLIP's text tower and CLIP's sizes, which this model does not use.
_UNUSED_OPENAI = re.compile(
    r"transformer\.resblocks\.\d+\.(attn\.(in_proj_weight|in_proj_bias|out_proj\.(weight|bias))|"
    r"ln_[12]\.(weight|bias)|mlp\.c_(fc|proj)\.(weight|bias))|"
    r"positional_embedding|text_projection|logit_scale|token_embedding\.weight|ln_final\.(weight|bias)|"
    r"input_resolution|context_length|vocab_size"
)
_UNUSED_HUGGINGFACE = re.compile(
    r"text_model\.(embeddings\.(token_embedding\.weight|position_embedding\.weight|position_ids)|"
    r"final_layer_norm\.(weight|bias)|encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|layer_norm[12]|mlp\.fc[12])"
    r"\.(weight|bias))|text_projection\.weight|logit_scale|vision_model\.embeddings\.position_ids"
)
_MEANING = "the file is damaged, or another model; the adapters want OpenAI's ViT-L/14"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSource:
    """An opened CLIP: its sizes, and the vision tower's tensors with the names of `PictureEncoder` (`clip.*`)."""

    name: str  # for messages: the path
    config: ClipConfig
    tensors: Mapping[str, Tensor]


def clip_file(path: str | os.PathLike[str]) -> Path:
    """The weight file of a CLIP at `path`, which is this file or a folder in Hugging Face's format.

    A `config.json` in the same folder is checked. Raises CheckpointError if there is no CLIP, or if the config is that
    of a CLIP that computes differently.
    """
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"There is no CLIP at `{place}`", hint="pass OpenAI's ViT-L-14.pt as --clip")
    if not place.is_dir():
        _check_huggingface_config(place.parent / "config.json")
        return place
    files = [place / name for name in ("model.safetensors", "pytorch_model.bin") if (place / name).is_file()]
    if not files:
        raise CheckpointError(
            f"The folder `{place}` holds no CLIP",
            hint="wanted: model.safetensors or pytorch_model.bin, a bundle, or a file",
        )
    _check_huggingface_config(place / "config.json")
    return files[0]


def read_clip(tensors: Mapping[str, Tensor], *, name: str) -> ClipSource:
    """The vision tower from a CLIP's tensors with OpenAI's or Hugging Face's names. `name` is used in messages.

    Tensors of the text tower are ignored. Raises CheckpointError for a ResNet, for other models, and for missing,
    unknown or misshapen tensors.
    """
    keys = list(tensors)
    if any(key.startswith("vision_model.") for key in keys):
        layout, unused = _HUGGINGFACE, _UNUSED_HUGGINGFACE
    elif any(key.startswith("visual.") for key in keys):
        if "visual.layer1.0.conv1.weight" in tensors:
            raise CheckpointError(f"`{name}` is a ResNet CLIP, where a ViT is wanted", hint=_MEANING)
        layout, unused = _OPENAI, _UNUSED_OPENAI
    else:
        kind = what_is(keys)
        raise CheckpointError(
            f"`{name}` is no CLIP" + (f": it is {kind}" if kind else ""),
            hint="it should hold `visual.*` (OpenAI) or `vision_model.*` (Hugging Face); were two files swapped?",
        )
    num_layers = count_blocks(keys, layout.blocks, what=f"`{name}`")
    used = {key: tensor for key, tensor in tensors.items() if not unused.fullmatch(key)}
    state = _translate(used, layout.names(num_layers), what=f"CLIP in `{name}`")
    if "visual.proj" in used and state["projection.weight"].ndim == 2:
        state["projection.weight"] = state["projection.weight"].t()
    config = _clip_config(state, num_layers=num_layers, name=name)
    return ClipSource(name=name, config=config, tensors={f"clip.{ours}": value for ours, value in state.items()})


def build_vision(
    visual: Mapping[str, Tensor],
    *,
    name: str,
    clip: ClipSource | None,
    visual_heads: int | None = None,
    channel_order: ChannelOrder = "rgb",
    dtype: torch.dtype | None = torch.float32,
) -> tuple[VisionConfig, dict[str, Tensor]]:
    """Configuration and state dict of `PictureEncoder`, from a CLIP and an adapter's visual tensors.

    The result's tensors are in `dtype`, or in the dtypes of their files if it is None. `visual` has the names of the
    adapter's file (`visual_blocks.*`, `clip_proj.*`, ...), and `name` is this file's name in messages. No file stores
    `visual_heads`; it is 16 at width 768, and must be given otherwise. Raises CheckpointError for missing, unknown or
    unsuitable tensors.
    """
    if clip is None:
        raise CheckpointError(
            f"The adapter `{name}` holds no CLIP, and none was given",
            hint="pass OpenAI's ViT-L-14.pt as --clip",
        )
    query, state = read_query(visual, name=name, visual_heads=visual_heads)
    wanted, found = state["input_projection.weight"].shape[1], clip.config.output_dim
    if wanted != found:
        raise CheckpointError(
            f"The adapter `{name}` wants CLIP features of width {wanted}, and `{clip.name}` gives {found}",
            hint="the released adapters want OpenAI's ViT-L/14, whose features are 768 wide",
        )
    config = VisionConfig(clip=clip.config, query=query, channel_order=channel_order)
    whole = {**clip.tensors, **{f"query.{ours}": value for ours, value in state.items()}}
    _check_shapes(whole, config, what=f"`{clip.name}` with `{name}`")
    return config, {ours: value.to(dtype or value.dtype).contiguous() for ours, value in whole.items()}


def read_query(
    visual: Mapping[str, Tensor], *, name: str, visual_heads: int | None = None
) -> tuple[QueryConfig, dict[str, Tensor]]:
    """Configuration and state dict of `VisualQueryBlocks` only. Raises as `build_vision`."""
    depth = count_blocks(visual, _QUERY.blocks, what=f"`{name}`")
    state = _translate(visual, _QUERY.names(depth), what=f"The visual part of `{name}`")
    return _query_config(state, depth=depth, name=name, visual_heads=visual_heads), state


def visual_tensors(state: Mapping[str, Tensor], *, depth: int) -> dict[str, Tensor]:
    """Inverse of `read_query`: the state dict of `VisualQueryBlocks` with the names of an adapter's file."""
    return {theirs: state[ours] for ours, (theirs,) in _QUERY.names(depth).items()}


def clip_tensors(state: Mapping[str, Tensor], *, depth: int) -> dict[str, Tensor]:
    """Inverse of `read_clip`: the state dict of `ClipVisionTower` with OpenAI's names, as adapter files hold it."""
    found = {theirs: state[ours] for ours, (theirs,) in _OPENAI.names(depth).items()}
    return found | {"visual.proj": found["visual.proj"].t().contiguous()}


def _translate(found: Mapping[str, Tensor], names: Names, *, what: str) -> dict[str, Tensor]:
    """The tensors listed in `names`, and no others, under our names.

    Several parts are concatenated along their rows.
    """
    wanted = [theirs for parts in names.values() for theirs in parts]
    check_names(found, wanted, what=what, meaning=_MEANING)
    check_dense({theirs: found[theirs] for theirs in wanted}, what=what)
    state = {}
    for ours, parts in names.items():
        tensors = [found[theirs] for theirs in parts]
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise CheckpointError(f"{what}: {list_keys(parts)} differ in shape", hint=_MEANING)
        state[ours] = (
            tensors[0]
            if len(tensors) == 1
            else torch.cat([tensor if tensor.ndim else tensor[None] for tensor in tensors])
        )
    return state


def _clip_config(state: Mapping[str, Tensor], *, num_layers: int, name: str) -> ClipConfig:
    patch, positions, projection = (
        state[key] for key in ("patch_embedding.weight", "position_embedding", "projection.weight")
    )
    if patch.ndim != 4 or positions.ndim != 2 or projection.ndim != 2:
        raise CheckpointError(f"CLIP in `{name}` has tensors of unexpected shape", hint=_MEANING)
    width, patch_size, grid = patch.shape[0], patch.shape[-1], round((positions.shape[0] - 1) ** 0.5)
    if grid < 1 or grid * grid + 1 != positions.shape[0] or width % CLIP_HEAD_DIM:
        raise CheckpointError(
            f"CLIP in `{name}` has {positions.shape[0]} positions and width {width}, which is no ViT of OpenAI's",
            hint=_MEANING,
        )
    try:
        return ClipConfig(
            image_size=grid * patch_size,
            patch_size=patch_size,
            width=width,
            num_layers=num_layers,
            num_heads=width // CLIP_HEAD_DIM,
            output_dim=projection.shape[0],
        )
    except ValueError as error:
        raise CheckpointError(f"The sizes of CLIP in `{name}` are impossible: {error}", hint=_MEANING) from None


def _query_config(state: Mapping[str, Tensor], *, depth: int, name: str, visual_heads: int | None) -> QueryConfig:
    queries, output = state["queries"], state["output_projection.weight"]
    if queries.ndim != 2 or output.ndim != 2 or state["input_projection.weight"].ndim != 2:
        raise CheckpointError(f"The visual part of `{name}` has tensors of unexpected shape", hint=_MEANING)
    num_queries, width = queries.shape
    num_heads = KNOWN_VISUAL_HEADS.get(width) if visual_heads is None else visual_heads
    if num_heads is None:
        raise CheckpointError(
            f"The visual blocks of `{name}` are {width} wide, and how many heads they have is stored in no file",
            hint="pass --visual-heads with the number the adapter was trained with (16 for the released ones)",
        )
    if num_heads < 1 or width % num_heads:
        raise CheckpointError(
            f"The visual blocks of `{name}` are {width} wide, which {num_heads} heads do not divide",
            hint="pass --visual-heads with the number the adapter was trained with",
        )
    try:
        return QueryConfig(
            num_queries=num_queries,
            width=width,
            depth=depth,
            num_heads=num_heads,
            mlp_dim=state["blocks.0.mlp.up.bias"].numel() if depth else 4 * width,
            output_dim=output.shape[0],
        )
    except ValueError as error:
        raise CheckpointError(
            f"The sizes of the visual part of `{name}` are impossible: {error}", hint=_MEANING
        ) from None


def _check_shapes(state: Mapping[str, Tensor], config: VisionConfig, *, what: str) -> None:
    """Raise CheckpointError unless the shapes are those of the module that gets these tensors."""
    with torch.device("meta"):
        wanted = PictureEncoder(config).state_dict()
    if state.keys() != wanted.keys():
        raise AssertionError(f"name tables and PictureEncoder differ: {sorted(state.keys() ^ wanted.keys())}")
    found = {ours: tuple(tensor.shape) for ours, tensor in state.items()}
    shapes = {ours: tuple(tensor.shape) for ours, tensor in wanted.items()}
    check_shapes(found, shapes, what=what, meaning=_MEANING)


def _check_huggingface_config(path: Path) -> None:
    """Raise CheckpointError for a CLIP with another activation, epsilon or head size; only its config shows these."""
    try:
        config = read_json(path)
    except CheckpointError:
        return  # no Hugging Face folder
    if "clip" not in str(config.get("model_type", "")):
        return
    vision = config.get("vision_config", config)
    if not isinstance(vision, dict):
        return
    activation, epsilon = vision.get("hidden_act", "quick_gelu"), vision.get("layer_norm_eps", 1e-5)
    if activation != "quick_gelu" or epsilon != 1e-5:
        raise CheckpointError(
            f"The CLIP in `{path.parent}` computes with {shown_excerpt(str(activation))} and eps "
            f"{shown_excerpt(str(epsilon))}, where quick_gelu and 1e-05 are wanted",
            hint=_MEANING,
        )
    width, heads = vision.get("hidden_size"), vision.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and width != heads * CLIP_HEAD_DIM:
        raise CheckpointError(
            f"The CLIP in `{path.parent}` has {heads} heads at width {width}, where {CLIP_HEAD_DIM} a head are wanted",
            hint=_MEANING,
        )
