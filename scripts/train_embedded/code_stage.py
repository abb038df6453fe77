"""Stage 2: decoder and adapters learn to answer. A symbolic code of the scene takes the place of the visual query."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded.answering import answer_states, prepare
from scripts.train_embedded.focus import CLASSES, NOT_ASKED
from scripts.train_embedded.loop import Optimizers, autocast, train
from scripts.train_embedded.packing import Packed, Packer, ask_many
from scripts.train_embedded.pictures import MAX_THINGS, NOTHING, UNKNOWN, scene_to_labels
from scripts.train_embedded.sizes import DECODER, build_decoder, is_hidden_matrix
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES, Scene, sample_scene

BATCH = 12
QUESTIONS = 8
NOISE = 0.25
CODE_SEED = 20
OPEN_GATE = 0.3  # closed gates would block the gradient
FOCUS_WEIGHT = 0.2


class SceneCode(nn.Module):
    """Scene labels (B, 3, 4) -> the visual query of an ideal picture encoder (B, Q, D): query k describes object k.

    It is a sum of fixed orthogonal vectors. It has no trained weights, so the picture encoder can learn to produce this
    code while the decoder learns to read it.
    """

    vectors: Tensor

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(CODE_SEED).standard_normal((DECODER.dim, DECODER.dim))
        vectors = np.linalg.qr(random)[0] * DECODER.dim**0.5
        self.register_buffer("vectors", torch.from_numpy(vectors.astype(np.float32)), persistent=False)

    def forward(self, labels_BO4: Tensor) -> Tensor:
        first = DECODER.num_queries
        slots = self.vectors[:first].expand(len(labels_BO4), -1, -1)
        parts = torch.zeros(*labels_BO4.shape[:2], DECODER.dim)
        for label, count in self._kinds(labels_BO4):
            parts = parts + self.vectors[first + 1 + label]  # NOTHING is -1 and selects the first vector of each kind
            first += count + 1
        return F.layer_norm(slots + F.pad(parts, (0, 0, 0, DECODER.num_queries - MAX_THINGS)), (DECODER.dim,))

    def readings(self, visual_query_BQD: Tensor, labels_BO4: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each kind of word, scores (B, 3, classes) from a visual query, and the correct labels (B, 3).

        Class 0 is "no object"; an UNKNOWN label stays UNKNOWN.
        """
        first = DECODER.num_queries
        for label, count in self._kinds(labels_BO4):
            vectors = self.vectors[first : first + count + 1]
            yield (
                visual_query_BQD[:, :MAX_THINGS] @ vectors.T * (20 / DECODER.dim),
                torch.where(label == UNKNOWN, UNKNOWN, label + 1),
            )
            first += count + 1

    @staticmethod
    def _kinds(labels_BO4: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Yields labels (B, 3) and the number of names for shape, colour, size, row and column."""
        shape, color, size, cell = labels_BO4.unbind(-1)
        nothing = cell == NOTHING
        yield shape, len(SHAPES)
        yield color, len(COLOR_NAMES)
        yield size, len(SIZES)
        yield torch.where(nothing, NOTHING, cell // 3), 3
        yield torch.where(nothing, NOTHING, cell % 3), 3


class FocusHead(nn.Module):
    """Temporary classifiers on the words of a question, after the first adapted layer."""

    def __init__(self, decoder: LlamaAdapterDecoder) -> None:
        super().__init__()
        self.linear = nn.Linear(DECODER.dim, sum(CLASSES.values()))
        self._seen: Tensor | None = None
        decoder.layers[DECODER.first_adapter_layer].register_forward_hook(self._keep)

    def _keep(self, layer: nn.Module, inputs: object, output: Tensor) -> None:
        self._seen = output

    def loss(self, packed: Packed) -> tuple[Tensor, float]:
        """Mean cross entropy over the kinds, and the share of correct readings, for the latest forward pass."""
        assert self._seen is not None
        words_FD = self._seen[packed.focus_row_F, packed.focus_column_F].float()
        scores = self.linear(F.layer_norm(words_FD, (DECODER.dim,))).split(list(CLASSES.values()), dim=-1)
        loss, hits = torch.zeros(()), []
        for index, score in enumerate(scores):
            label = packed.focus_label_FK[:, index]
            known = label != NOT_ASKED
            if known.any():
                loss = loss + F.cross_entropy(score[known], label[known])
                hits.append((score[known].argmax(-1) == label[known]).float().mean())
        self._seen = None
        return loss, float(torch.stack(hits).mean()) if hits else 0.0


class Gate(nn.Module):
    """Training learns gates before tanh, as in LLaMA-Adapter; the decoder stores tanh(gate)."""

    def forward(self, gates: Tensor) -> Tensor:
        return gates.tanh()

    def right_inverse(self, folded: Tensor) -> Tensor:
        return folded.clamp(-0.999, 0.999).atanh()


def run(*, tokenizer: Tokenizer, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 2) -> None:
    """Train decoder and adapters; writes code.pt into `folder`."""
    torch.manual_seed(seed)
    decoder, packer = build_decoder(), Packer(tokenizer)
    with torch.no_grad():
        decoder.adapter.gates.fill_(OPEN_GATE)
    open_gates(decoder)
    batch_at = partial(_batch_at, packer=packer, seed=seed)
    train_decoder("code", decoder, batch_at, partial(evaluate, packer=packer), num_steps, folder, lr=lr, seed=seed)


def train_decoder(
    stage: str,
    decoder: LlamaAdapterDecoder,
    batch_at: Callable[[int], tuple[Tensor, Packed]],
    evaluate: Callable[[SceneCode, LlamaAdapterDecoder], dict[str, float]],
    num_steps: int,
    folder: Path,
    *,
    lr: float,
    seed: int,
    evaluate_every: int = 400,
) -> None:
    """Train a decoder with open gates, together with a new focus head."""
    code = SceneCode()
    prepare(decoder)
    focus = FocusHead(decoder)
    train(
        stage,
        {"decoder": decoder, "focus": focus},
        Optimizers([(decoder, 1.0), (focus, 1.0)], lr=lr, is_hidden=is_hidden_matrix),
        batch_at,
        partial(_compute, code, decoder, focus),
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate(code, decoder),
        evaluate_every=evaluate_every,
    )


def open_gates(decoder: LlamaAdapterDecoder) -> None:
    """Parametrise the gates by their values before tanh; `close_gates` applies tanh."""
    parametrize.register_parametrization(decoder.adapter, "gates", Gate())


def close_gates(decoder: LlamaAdapterDecoder) -> None:
    parametrize.remove_parametrizations(decoder.adapter, "gates", leave_parametrized=True)


def sample_questions_scene(rng: np.random.Generator, *, never_drawn: str = "any") -> Scene:
    """A scene without pixels; every pair may occur.

    Scenes with several objects are more frequent, because they allow more questions.
    """
    return sample_scene(
        rng, num_objects=int(rng.choice((1, 2, 3), p=(0.12, 0.35, 0.53))), never_drawn=never_drawn, placed=False
    )


def evaluate(
    code: SceneCode, decoder: LlamaAdapterDecoder, packer: Packer, *, num_scenes: int = 256, seed: int = 12345
) -> dict[str, float]:
    """Exact match by task on fresh scenes in symbols, without noise.

    The prefix `pair-` marks scenes with never-drawn pairs.
    """
    rng = np.random.default_rng(seed)
    hits: dict[str, list[bool]] = defaultdict(list)
    for prefix, never_drawn in (("", "any"), ("pair-", "with")):
        for _ in range(num_scenes // 16):
            scenes = [sample_questions_scene(rng, never_drawn=never_drawn) for _ in range(16)]
            packed = packer.pack([ask_many(scene, rng, count=8) for scene in scenes])
            for task, values in answer_hits(decoder, code(labels_of(scenes)), packed).items():
                hits[prefix + task] += values
    return {task: float(np.mean(values)) for task, values in sorted(hits.items())}


def answer_loss(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> Tensor:
    """Weighted cross entropy summed over all answer tokens, per answer."""
    logits_NV = _answer_logits(decoder, visual_query_BQD, packed)
    losses_N = F.cross_entropy(logits_NV, packed.target_N, reduction="none")
    return (losses_N * packed.weight_N).sum() / len(packed.tasks)


@torch.no_grad()
def answer_hits(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> dict[str, list[bool]]:
    """By task, whether each answer is right from the first token to the last, as greedy decoding would produce it."""
    logits_NV = _answer_logits(decoder, visual_query_BQD, packed)
    wrong_N = (logits_NV.argmax(-1) != packed.target_N).long()
    wrong_per_answer = torch.zeros(len(packed.tasks), dtype=torch.long).index_add(0, packed.answer_N, wrong_N)
    hits: dict[str, list[bool]] = defaultdict(list)
    for task, wrong in zip(packed.tasks, wrong_per_answer.tolist(), strict=True):
        hits[task].append(wrong == 0)
    return dict(hits)


def _answer_logits(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> Tensor:
    with autocast():
        return decoder.logits(answer_states(decoder, visual_query_BQD, packed))


def labels_of(scenes: list[Scene]) -> Tensor:
    stacked: NDArray[np.int64] = np.stack([scene_to_labels(scene) for scene in scenes]).astype(np.int64)
    return torch.from_numpy(stacked)


def _batch_at(step: int, *, packer: Packer, seed: int) -> tuple[Tensor, Packed]:
    rng = np.random.default_rng([seed, step])
    scenes = [sample_questions_scene(rng) for _ in range(BATCH)]
    return labels_of(scenes), packer.pack([ask_many(scene, rng, count=QUESTIONS) for scene in scenes], scenes)


def _compute(
    code: SceneCode, decoder: LlamaAdapterDecoder, focus: FocusHead, batch: tuple[Tensor, Packed]
) -> tuple[Tensor, dict[str, float]]:
    labels, packed = batch
    visual_query = code(labels)
    # The noise stands for pictures, which are read less exactly than symbols.
    visual_query = visual_query + NOISE * torch.rand(BATCH, 1, 1) * torch.randn_like(visual_query)
    loss = answer_loss(decoder, visual_query, packed)
    to_words, found = focus.loss(packed)
    return loss + FOCUS_WEIGHT * to_words, {"answers": float(loss.detach()), "words": found}
