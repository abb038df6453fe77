"""Trains a small encoder to see what the answers say, before the decoder learns to say it.

First the picture tower learns: a linear layer on the mean of CLIP's tokens predicts the class of an augmented picture,
or several answers or words of it (targets.py).
Then the visual blocks learn over the finished tower, with a linear layer on the mean of the visual queries. They learn
the probabilities that the tower's layer gives each picture, which say more than its class. Neither layer is kept.
The decoder is not computed, so the same minutes allow several times as many steps as training through it. It learns
afterwards, from several views of each picture. It reads the mean of two pictures' visual queries, and learns what the
second linear layer finds in it, and both right answers.

The embedded model's tower starts from weights that scripts/train_start_tower.py trained further, on drawings of 512
invented classes, because they learn other classes faster.
"""

# B pictures, N pictures of all, S pixels a side, P patches, T tokens, C width of CLIP's features, K logits

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.app.learning.training import checkpoint
from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import NUM_DRAWN, Encodings, Views, augmented, generator
from llama_adapter.app.learning.training.checkpoint import WEIGHT, LoopState
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.loop import TrainProgress
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.ranks import OneRank
from llama_adapter.app.learning.training.stepping import Muon, NamedAdamW, NamedOptimiser
from llama_adapter.app.learning.training.targets import Targets
from llama_adapter.app.models.bundle_manifest import VISION
from llama_adapter.app.models.resources import embedded_model, start_tower
from llama_adapter.vision.config import VisionConfig

EYE = "tower.safetensors"  # its state, in the folder of a run
_SMALL: Final = 20_000_000  # weights of a tower that is trained by default
_BATCH: Final = 32
_PASSES, _FEWEST_EPOCHS, _MOST_EPOCHS = 16_000, 6, 150  # pictures that a run learns from, each epoch counted
_MATRIX_RATE, _RATE, _WARMUP = 5e-3, 1e-3, 0.1  # of Muon and AdamW
_DECAY = 0.05
_BLOCK_SHARE, _FEWEST_BLOCK_STEPS = 0.2, 60  # steps of the visual blocks, as a share of those of the tower
_VIEWED, _FEWEST_VIEWS, _MOST_VIEWS = 4000, 4, 12  # pictures that the decoder learns from, each view counted
_SAVE_EVERY_S: Final = 60.0
_TOGETHER: Final = 64  # pictures encoded at once


def is_small(config: VisionConfig | None) -> bool:
    """Whether a tower has few enough weights to be trained by default: at most 20 million."""
    if config is None:
        return False
    clip = config.clip
    block = 2 * clip.width * (2 * clip.width + clip.hidden_dim)
    return clip.num_layers * block + 3 * clip.width * clip.patch_size**2 <= _SMALL


def num_epochs(job: TrainJob, num_examples: int) -> int:
    """Passes over the pictures: `tower_epochs`, or as many as give 16,000 pictures, between 6 and 150."""
    given = job.optimisation.tower_epochs
    return min(max(_PASSES // num_examples, _FEWEST_EPOCHS), _MOST_EPOCHS) if given is None else given


class Stage:
    """Parameters that learn together, for a number of steps: matrices of blocks by Muon, others by AdamW."""

    def __init__(self, parameters: dict[str, nn.Parameter], *, num_steps: int) -> None:
        self.parameters, self.num_steps = parameters, num_steps
        matrices = {name: one for name, one in parameters.items() if ".blocks." in name and one.ndim == 2}
        others = {name: one for name, one in parameters.items() if name not in matrices}
        is_plain = {name for name, one in others.items() if one.ndim < 2}
        muon = Muon(matrices.values(), weight_decay=_DECAY)
        self._muon = NamedOptimiser(muon, matrices, kinds=("momentum",))
        self._adamw = NamedAdamW(others, no_decay=is_plain, weight_decay=_DECAY)

    def rate(self, step: int) -> float:
        """The factor on the learning rates at a step, which counts from 0: it rises, then falls as a cosine."""
        share = (step + 1) / self.num_steps
        return min(share / _WARMUP, 1.0) * 0.5 * (1 + math.cos(math.pi * max(0.0, share - _WARMUP) / (1 - _WARMUP)))

    def update(self, step: int, *, max_norm: float) -> None:
        """Update the parameters by their gradients, and delete these."""
        nn.utils.clip_grad_norm_(list(self.parameters.values()), max_norm or math.inf)
        for optimiser, rate in ((self._muon, _MATRIX_RATE), (self._adamw, _RATE)):
            optimiser.set_rate(rate * self.rate(step))
            optimiser.torch.step()
            optimiser.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Weights, and the state of the optimisers if there was a step."""
        weights: dict[str, Tensor] = {f"{WEIGHT}{name}": one.detach() for name, one in self.parameters.items()}
        return {**weights, **self._muon.state(), **self._adamw.state()}

    def shapes(self, *, has_begun: bool) -> dict[str, tuple[int, ...]]:
        """The names and shapes of `tensors`, before or after the first step."""
        weights = checkpoint.weight_shapes(self.parameters)
        return {**weights, **self._muon.shapes(), **self._adamw.shapes()} if has_begun else weights

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, has_begun: bool) -> None:
        """Set weights and optimisers to tensors with these names and shapes."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[f"{WEIGHT}{name}"])
        if has_begun:
            self._muon.load_state(tensors)
            self._adamw.load_state(tensors)


class Teacher:
    """What the linear layer of a trained encoder finds in visual queries. It outlives the training of the encoder."""

    def __init__(self, head: nn.Module, targets: Targets, *, device: torch.device) -> None:
        self._head, self._targets, self._device = head, targets, device

    def __call__(self, examples: Sequence[TrainExample], query_BQD: Tensor) -> Sequence[Mapping[str, float]]:
        """The probability of each answer to the question of each of B examples, see `Targets.shares`."""
        return self._targets.shares(self.logits(query_BQD), examples)

    @torch.no_grad()
    def logits(self, query_BQD: Tensor) -> Tensor:
        """The logits of all groups, (B, K) on the CPU."""
        logits_BK: Tensor = self._head(query_BQD.to(self._device, torch.float32).mean(1))
        return logits_BK.cpu()


class Eye:
    """The encoder in training. All ranks make the same steps together."""

    def __init__(
        self,
        model: TrainableModel,
        targets: Targets,
        *,
        encodings: Encodings,
        job: TrainJob,
        run: str,
        ranks: OneRank,
    ) -> None:
        """`encodings` are pixels. `run` is the digest of what the steps depend on."""
        assert model.vision is not None, "the model sees pictures"
        self._model, self._vision, self._device = model, model.vision, model.device
        self._targets, self._examples = targets, [own[0] for own in targets.pictures]
        self._label_NG = targets.labels()
        self._encodings, self._job, self._ranks = encodings, job, ranks
        clip, config = model.vision.clip, model.vision_config
        # Sums of a patch's weights over 2 x 2 pixels compute the same from a picture of half the size.
        self._pixel = 2 if config.clip.patch_size % 2 == 0 else 1
        side = config.clip.patch_size // self._pixel
        whole = clip.patch_embedding.weight.detach().view(-1, 3, side, self._pixel, side, self._pixel)
        self._patch = nn.Parameter(whole.sum((3, 5)).contiguous())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(job.seed)
            num_logits = sum(len(group.answers) for group in targets.groups)
            widths = config.clip.output_dim, config.query.output_dim
            heads = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_logits)) for width in widths]
        self._tower_head, self._query_head = (head.to(self._device) for head in heads)
        self._teacher = Teacher(self._query_head, targets, device=self._device)
        tower = {f"clip.{name}": one for name, one in clip.named_parameters() if name != "patch_embedding.weight"}
        tower |= {"patches": self._patch}
        if _is_embedded(clip.state_dict()):
            with torch.no_grad():
                for name, one in load_file(start_tower()).items():
                    tower[name].copy_(one)
        tower |= _named(self._tower_head, "tower_head")
        blocks = _named(model.vision.query, "query") | _named(self._query_head, "query_head")
        self._each = max(1, round(len(self._examples) / _BATCH))
        num_steps = self._each * num_epochs(job, len(self._examples))
        num_of_blocks = max(round(num_steps * _BLOCK_SHARE), _FEWEST_BLOCK_STEPS) if num_steps else 0
        self._tower, self._blocks = Stage(tower, num_steps=num_steps), Stage(blocks, num_steps=num_of_blocks)
        self._path = job.folder / EYE
        self._state = LoopState(num_steps=num_steps + num_of_blocks, run=run)

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        return self._state.num_steps

    def resume(self) -> None:
        """Continue from the state in the run's folder, if there is one. Raises CheckpointError and UsageError."""
        if not self._path.is_file():
            return
        tensors, state = checkpoint.read_checkpoint(self._path)
        if (state.run, state.num_steps) != (self._state.run, self._state.num_steps):
            raise checkpoint.other_run(self._job.folder)
        begun = (state.step > 0, state.step > self._tower.num_steps)
        stages = tuple(zip((self._tower, self._blocks), begun, strict=True))
        shapes = {name: shape for stage, has in stages for name, shape in stage.shapes(has_begun=has).items()}
        checkpoint.check_tensors(tensors, shapes, path=self._path)
        for stage, has_begun in stages:
            stage.load(tensors, has_begun=has_begun)
        self._state = state
        self._adopt()

    def train(self, progress: TrainProgress, *, is_asked_to_end: Callable[[], bool]) -> bool:
        """Train to the end; False if it was asked to end. The state is saved each minute. Raises OSError."""
        state, began, saved = self._state, time.monotonic() - self._state.elapsed_s, time.monotonic()
        is_whole = True
        while state.step < state.num_steps and is_whole:
            loss, num_examples, lr = self._step()
            state.step += 1
            state.num_examples += num_examples
            state.elapsed_s = time.monotonic() - began
            flags = torch.tensor([float(is_asked_to_end()), float(time.monotonic() - saved > _SAVE_EVERY_S)])
            asked, due = self._ranks.sum(flags).tolist()
            is_whole = not asked
            if state.step == self._tower.num_steps:
                self._adopt()
            if due or asked or state.step == state.num_steps:
                self._save()
                saved = time.monotonic()
            progress.step(state.step, loss=loss, lr=lr, num_examples=num_examples)
            if state.step == self._tower.num_steps:
                progress.begin_stage()
        progress.clear()
        return is_whole

    @torch.no_grad()
    def are_right(self, examples: Sequence[TrainExample]) -> list[bool]:
        """Whether the linear layer finds the answer in the visual query, of examples whose question has answers."""
        seen = [one for one in examples if one.has_picture]
        return self._targets.are_right(self._teacher.logits(self._queries(seen, random=None)), seen) if seen else []

    def finished(self, data: TrainingData) -> Encodings:
        """Freeze the encoder; returns the encodings for the rest of the training: visual queries of several views."""
        self._model.freeze_vision()
        random = torch.Generator().manual_seed(self._job.seed)
        views: dict[str, Tensor] = {}
        train, validation = (list({one.example.digest: one for one in part}.values()) for _, part in data.parts[:2])
        num_views = min(max(_VIEWED // len(train), _FEWEST_VIEWS), _MOST_VIEWS)
        for examples, count in ((train, num_views), (validation, 1)):
            kinds = (None, *[random] * (count - 1))
            views_VBQD = torch.stack([self._queries(examples, random=one) for one in kinds]) if examples else ()
            for place, one in enumerate(examples):
                own_VQD = views_VBQD[:, place]  # type: ignore[call-overload]
                views[one.example.digest] = own_VQD if one.has_picture else own_VQD[:1]
        return Views(views, learned=data.train, teach=self._teacher)

    @torch.no_grad()
    def _queries(self, examples: Sequence[TrainExample], *, random: torch.Generator | None) -> Tensor:
        """The visual queries of pictures, with `random` of changed ones, (B, Q, D) on the CPU."""
        found = []
        for at in range(0, len(examples), _TOGETHER):
            pixels = self._pixels(examples[at : at + _TOGETHER])
            seen = pixels if random is None else augmented(pixels, torch.rand(NUM_DRAWN, len(pixels), generator=random))
            found.append(self._vision.query(self._features(seen)))
        return torch.cat(found).cpu()

    def _step(self) -> tuple[float, int, float]:
        """One step; returns the loss, the number of examples of all ranks, and the learning rate."""
        step, tower = self._state.step, self._tower
        epoch, place = divmod(step, self._each)
        order = torch.randperm(len(self._examples), generator=generator(self._job.seed, epoch))
        chosen = order[place :: self._each]
        drawn_KB = torch.rand(NUM_DRAWN, len(chosen), generator=generator(self._job.seed, step))
        own = slice(self._ranks.rank, None, self._ranks.size)
        is_tower = step < tower.num_steps
        pixels = augmented(self._pixels([self._examples[index] for index in chosen]), drawn_KB)[own]
        loss = torch.zeros((), device=self._device)
        if len(pixels):
            label_BG = self._label_NG[chosen[own]].to(self._device)
            with nullcontext() if is_tower else torch.no_grad():
                features_BTC = self._features(pixels)
                tower_BK = self._tower_head(features_BTC.mean(1))
            if is_tower:
                loss_B = self._targets.losses(tower_BK, label_BG)
            else:
                logits_BK = self._query_head(self._vision.query(features_BTC).mean(1))
                loss_B = self._targets.losses(logits_BK, tower_BK)
            loss = loss_B.sum() / len(chosen)
            loss.backward()  # type: ignore[no-untyped-call]
        stage, step = (tower, step) if is_tower else (self._blocks, step - tower.num_steps)
        if self._ranks.size > 1:
            for parameter in stage.parameters.values():
                own_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._ranks.sum(own_grad)
        stage.update(step, max_norm=self._job.optimisation.max_norm)
        return float(self._ranks.sum(loss.detach().double()[None]).item()), len(chosen), _RATE * stage.rate(step)

    def _pixels(self, examples: Sequence[TrainExample]) -> Tensor:
        """Float pixels (B, 3, S, S) in 0..255, at the size at which the tower is trained."""
        pixels_BHWC = self._encodings.of(examples)
        assert pixels_BHWC is not None, "the model sees pictures"
        pixels_BCSS = pixels_BHWC.to(self._device).permute(0, 3, 1, 2).float()
        return F.avg_pool2d(pixels_BCSS, self._pixel) if self._pixel > 1 else pixels_BCSS

    def _features(self, pixels_BCSS: Tensor) -> Tensor:
        """CLIP's features (B, T, C)."""
        side = self._patch.shape[-1]
        normal_BCSS = self._vision.normalise(pixels_BCSS.permute(0, 2, 3, 1))
        grid = normal_BCSS.shape[2] // side
        cut = normal_BCSS[:, :, : grid * side, : grid * side].reshape(-1, 3, grid, side, grid, side)
        patches_BPF = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        clip = self._vision.clip
        return clip.tower(F.linear(patches_BPF, self._patch.flatten(1), clip.patch_embedding.bias))

    @torch.no_grad()
    def _adopt(self) -> None:
        """Write the patches' weights into the tower, at its own size."""
        whole = self._patch.repeat_interleave(self._pixel, 2).repeat_interleave(self._pixel, 3) / self._pixel**2
        self._vision.clip.patch_embedding.weight.copy_(whole)

    def _save(self) -> None:
        if self._ranks.is_first:
            checkpoint.write_checkpoint(self._path, {**self._tower.tensors(), **self._blocks.tensors()}, self._state)


def _named(module: nn.Module, prefix: str) -> dict[str, nn.Parameter]:
    return {f"{prefix}.{name}": one for name, one in module.named_parameters()}


def _is_embedded(clip: Mapping[str, Tensor]) -> bool:
    """Whether a tower has the weights of the embedded model."""
    ours = load_file(embedded_model() / VISION)
    pairs = ((one.cpu(), ours.get(f"clip.{name}")) for name, one in clip.items())
    return all(known is not None and torch.equal(one, known.to(one.dtype)) for one, known in pairs)
