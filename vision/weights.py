"""Converts the visual part of adapter files, with a tower, to the encoder's configuration and state dict."""

from collections.abc import Mapping

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.files import check_shapes, count_blocks
from llama_adapter.vision.config import ChannelOrder, QueryConfig, VisionConfig
from llama_adapter.vision.encoder import VisualQueryBlocks
from llama_adapter.vision.tensor_names import LAYOUTS, MEANING, translate
from llama_adapter.vision.towers import ClipSource

KNOWN_VISUAL_HEADS = {768: 16}  # width of the visual blocks -> number of heads, which no file stores
_QUERY = LAYOUTS["query"]


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
    with torch.device("meta"):
        blocks = VisualQueryBlocks(query, input_dim=found).state_dict()
    shapes = ({ours: tuple(tensor.shape) for ours, tensor in tensors.items()} for tensors in (state, blocks))
    check_shapes(*shapes, what=f"The visual part of `{name}`", meaning=MEANING)
    config = VisionConfig(clip=clip.config, query=query, channel_order=channel_order)
    whole = {**clip.tensors, **{f"query.{ours}": value for ours, value in state.items()}}
    return config, {ours: value.to(dtype or value.dtype).contiguous() for ours, value in whole.items()}


def read_query(
    visual: Mapping[str, Tensor], *, name: str, visual_heads: int | None = None
) -> tuple[QueryConfig, dict[str, Tensor]]:
    """Configuration and state dict of `VisualQueryBlocks` only. Raises as `build_vision`."""
    depth = count_blocks(visual, _QUERY.blocks, what=f"`{name}`")
    state = translate(visual, _QUERY.names(depth), what=f"The visual part of `{name}`")
    return _query_config(state, depth=depth, name=name, visual_heads=visual_heads), state


def visual_tensors(state: Mapping[str, Tensor], *, depth: int) -> dict[str, Tensor]:
    """Inverse of `read_query`: the state dict of `VisualQueryBlocks` with the names of an adapter's file."""
    return {theirs: state[ours] for ours, (theirs,) in _QUERY.names(depth).items()}


def _query_config(state: Mapping[str, Tensor], *, depth: int, name: str, visual_heads: int | None) -> QueryConfig:
    queries, output = state["queries"], state["output_projection.weight"]
    if queries.ndim != 2 or output.ndim != 2 or state["input_projection.weight"].ndim != 2:
        raise CheckpointError(f"The visual part of `{name}` has tensors of unexpected shape", hint=MEANING)
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
            f"The sizes of the visual part of `{name}` are impossible: {error}", hint=MEANING
        ) from None
