"""What each stage of `train` finds in held-out pictures: the linear layers of its tower and of its visual blocks.

`train` throws both layers away when the adapter is finished. They are read from its working state.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from llama_adapter.app.learning.training.checkpoint import WEIGHT, read_checkpoint
from llama_adapter.app.learning.training.eye import EYE
from scripts.own_pictures.baselines import open_encoder, tower_features
from scripts.own_pictures.sets import Part

TOWER, QUERY = "tower", "visual query"


@torch.no_grad()
def shares_right(run: Path, held: Part) -> dict[str, float]:
    """The share of the held-out pictures that each stage sorts into its class, by stage.

    `run` is the folder of a finished run of `train`.
    """
    encoder, rule = open_encoder(run / "bundle")
    heads, _ = read_checkpoint(run / EYE)
    features_MTC = tower_features(held.pictures, encoder, rule)
    seen = {TOWER: ("tower_head", features_MTC), QUERY: ("query_head", encoder.query(features_MTC))}
    labels_M = torch.from_numpy(held.labels_N)
    return {stage: float((_classes(heads, *each) == labels_M).float().mean()) for stage, each in seen.items()}


def _classes(heads: dict[str, Tensor], name: str, tokens_BTC: Tensor) -> Tensor:
    """The classes (B,) that a layer norm and a linear layer find in the mean of the tokens."""
    width = tokens_BTC.shape[-1]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(heads[f"{WEIGHT}{name}.1.bias"])))
    head.load_state_dict({key: heads[f"{WEIGHT}{name}.{key}"] for key in head.state_dict()})
    classes_B: Tensor = head(tokens_BTC.mean(1)).argmax(1)
    return classes_B
