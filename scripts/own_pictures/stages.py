"""What each stage of `train` finds in held-out pictures: the linear layers of its tower and of its visual blocks.

`train` throws both layers away when the adapter is finished. They are read from its working state.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from llama_adapter.app.learning.training.checkpoint import WEIGHT, read_checkpoint
from llama_adapter.app.learning.training.eye import EYE
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.preprocess import preprocess
from scripts.own_pictures.sets import Part

TOWER, QUERY = "tower", "visual query"
_AT_ONCE = 20  # pictures in one pass


@torch.no_grad()
def shares_right(run: Path, held: Part) -> dict[str, float]:
    """The share of the held-out pictures that each stage sorts into its class, by stage.

    `run` is the folder of a finished run of `train`.
    """
    model = load_bundle(run / "bundle")
    encoder = encoder_from_state(model.vision_config, {name: one.float() for name, one in model.vision_state.items()})
    heads, _ = read_checkpoint(run / EYE)
    found: dict[str, list[Tensor]] = {TOWER: [], QUERY: []}
    for at in range(0, len(held.pictures), _AT_ONCE):
        pixels = [preprocess(one, rule=model.vision_config.clip.pixels) for one in held.pictures[at : at + _AT_ONCE]]
        features_BTC = encoder.features(torch.stack([torch.from_numpy(one) for one in pixels]))
        found[TOWER].append(_classes(heads, "tower_head", features_BTC))
        found[QUERY].append(_classes(heads, "query_head", encoder.query(features_BTC)))
    labels_M = torch.from_numpy(held.labels_N)
    return {stage: float((torch.cat(classes) == labels_M).float().mean()) for stage, classes in found.items()}


def _classes(heads: dict[str, Tensor], name: str, tokens_BTC: Tensor) -> Tensor:
    """The classes (B,) that a layer norm and a linear layer find in the mean of the tokens."""
    width = tokens_BTC.shape[-1]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(heads[f"{WEIGHT}{name}.1.bias"])))
    head.load_state_dict({key: heads[f"{WEIGHT}{name}.{key}"] for key in head.state_dict()})
    classes_B: Tensor = head(tokens_BTC.mean(1)).argmax(1)
    return classes_B
