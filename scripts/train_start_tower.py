"""Trains the tower that `train` starts from, on pictures of invented things: `python -m scripts.train_start_tower`.

The embedded model's picture tower learns to tell 512 classes of start_pictures.py apart. A second task
teaches each token what is around it. The run takes about 45 minutes of one core. It goes on from its last state, which
it saves each minute. `start.safetensors` in its folder is the finished tower, assets/start-tower.safetensors.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.app.learning.training.eye import Stage
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.vision.block import plain_attention
from llama_adapter.vision.encoder import PictureEncoder, use_attention
from scripts import start_pictures

NUM_CLASSES, _EACH, _BATCH, _SEED = 512, 16, 64, 20261128
_WARMUP, _FALL, _SAVE_EVERY_S = 40, 0.25, 60.0  # steps, a share of the steps


class _Even(Stage):
    """Its rate is constant and falls to 0 in the last quarter, so a run can be made longer or shorter."""

    def rate(self, step: int) -> float:
        return min((step + 1) / _WARMUP, 1.0, (self.num_steps - step) / (self.num_steps * _FALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for the state and the finished tower")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    state_path, log = arguments.folder / "state.safetensors", arguments.folder / "log.txt"
    bundle = load_bundle(embedded_model())
    encoder = PictureEncoder(bundle.vision_config)
    encoder.load_state_dict({name: one.float() for name, one in bundle.vision_state.items()})
    use_attention(encoder, plain_attention)
    torch.manual_seed(_SEED)
    head = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, NUM_CLASSES))
    whole = encoder.clip.patch_embedding.weight.detach()
    patches = nn.Parameter(whole.view(-1, 3, 14, 2, 14, 2).sum((3, 5)).contiguous())
    parameters = {f"clip.{name}": one for name, one in encoder.clip.named_parameters() if "patch_embedding" not in name}
    near = nn.Linear(192, 2 * 12 * 12)
    parameters |= {f"head.near.{name}": one for name, one in near.named_parameters()}
    parameters |= {"patches": patches, **{f"head.{name}": one for name, one in head.named_parameters()}}
    stage, first = _Even(parameters, num_steps=arguments.steps), 0
    if state_path.is_file():
        tensors = load_file(state_path)
        first = int(tensors.pop("step"))
        stage.load(tensors, has_begun=True)
    masks = start_pictures.templates(NUM_CLASSES, each=_EACH, seed=_SEED)
    noise = start_pictures.noises(_SEED)

    def features(pixels_BCSS: Tensor) -> Tensor:
        normal = encoder.normalise(pixels_BCSS.permute(0, 2, 3, 1))
        cut = normal.reshape(len(normal), 3, 8, 14, 8, 14).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return encoder.clip.tower(cut @ patches.flatten(1).T)

    def save(step: int) -> None:
        save_file({**stage.tensors(), "step": torch.tensor(step)}, f"{state_path}.part")
        os.replace(f"{state_path}.part", state_path)
        tower = {name: one.detach().half() for name, one in parameters.items() if not name.startswith("head.")}
        save_file(tower, arguments.folder / "start.safetensors")

    saved, loss_mean, right_mean = time.monotonic(), 0.0, 0.0
    for step in range(first, arguments.steps):
        random = torch.Generator().manual_seed((_SEED << 20) + step)
        labels_B = torch.randint(NUM_CLASSES, (_BATCH,), generator=random)
        pixels, where_B2SS = start_pictures.pictures(masks, noise, labels_B, each=_EACH, random=random)
        features_BTC = features(pixels)
        logits_BK = head(features_BTC.mean(1))
        # Every token tells where the thing and its tones are in its own patch and the eight around.
        cells = F.unfold(F.interpolate(where_B2SS, size=32, mode="area"), 12, padding=4, stride=4).mT
        local = F.binary_cross_entropy_with_logits(near(features_BTC[:, 1:]), cells.clamp(0, 1))
        loss = F.cross_entropy(logits_BK, labels_B, label_smoothing=0.1)
        (loss + 5 * local).backward()  # type: ignore[no-untyped-call]
        stage.update(step, max_norm=1.0)
        right = (logits_BK.argmax(1) == labels_B).float().mean().item()
        share = max(0.02, 1 / (step - first + 1))
        loss_mean, right_mean = loss_mean + share * (loss.item() - loss_mean), right_mean + share * (right - right_mean)
        if (step + 1) % 20 == 0:
            with log.open("a") as lines:
                took = f"cpu {time.process_time():.0f}"
                lines.write(f"{step + 1} loss {loss_mean:.3f} right {right_mean:.3f} local {local.item():.3f} {took}\n")
        if time.monotonic() - saved > _SAVE_EVERY_S or step + 1 == arguments.steps:
            save(step + 1)
            saved = time.monotonic()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
