"""The stages of the language half. A symbolic code of the scene takes the place of the visual query.

`code`: decoder and adapters learn to answer. `wording`: the decoder learns to answer questions in other words, and to
refuse questions that it cannot answer.
"""

# B rows, S tokens, P positions attended to, N heads, H head size, D model width, V pieces,
# O objects, Q visual queries, F focus words

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.operators import ATEN
from scripts.train_embedded.loop import autocast, train, trained
from scripts.train_embedded.packing import Packed, Packer, ask_many
from scripts.train_embedded.pictures import MAX_THINGS, NOTHING, UNKNOWN, scene_to_labels
from scripts.train_embedded.questions import CLASSES, NOT_ASKED, Question
from scripts.train_embedded.sizes import DECODER, build_decoder
from scripts.train_embedded.wordings import outside, reword
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES, Scene, sample_scene

BATCH = 12
QUESTIONS = 8
NOISE = 0.25
CODE_SEED = 20
OPEN_GATE = 0.3  # closed gates would block the gradient
FOCUS_WEIGHT = 0.2
KNOWN, OUTSIDE = 0.25, 0.12  # shares of questions in `wording`; all others are reworded
ROW_TOKENS = 170  # tokens of questions and answers in a row of `wording`, after the shared beginning

Ask = Callable[..., list[Question]]  # scene, random numbers, `count`


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


def ask_all(scene: Scene, rng: np.random.Generator, *, count: int) -> list[Question]:
    """`count` questions, some in known words and some that cannot be answered."""
    asked = []
    for question in ask_many(scene, rng, count=count):
        draw = rng.random()
        if draw < OUTSIDE:
            asked.append(outside(rng))
        else:
            asked.append(question if draw < OUTSIDE + KNOWN else reword(question, scene, rng))
    return asked


def fill_row(scene: Scene, rng: np.random.Generator, *, packer: Packer) -> list[Question]:
    """Questions with about `ROW_TOKENS` tokens in total, so that rows need little padding."""
    asked, left = list[Question](), ROW_TOKENS
    for question in ask_all(scene, rng, count=2 * QUESTIONS):
        prompt, answer = packer.encode(question.text, question.answer)
        if len(prompt) + len(answer) <= left:
            asked.append(question)
            left -= len(prompt) + len(answer) - 1
    return asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """Questions about fresh scenes in symbols, without noise, to evaluate a decoder."""

    seed: int
    num_scenes: int
    parts: Sequence[tuple[str, str, Ask]]  # a prefix of the tasks, `never_drawn` as in `sample_scene`, what is asked


CODE_EXAM = Exam(seed=12345, num_scenes=256, parts=(("", "any", ask_many), ("pair-", "with", ask_many)))
# `known-` marks questions in known words.
WORDING_EXAM = Exam(
    seed=54321,
    num_scenes=160,
    parts=(("known-", "any", ask_many), ("pair-", "with", ask_many), ("", "any", ask_all)),
)


def run_code(*, tokenizer: Tokenizer, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 2) -> None:
    """Train decoder and adapters; writes code.pt into `folder`."""
    torch.manual_seed(seed)
    decoder = build_decoder()
    with torch.no_grad():
        decoder.adapter.gates.fill_(OPEN_GATE)
    open_gates(decoder)
    fill = partial(ask_many, count=QUESTIONS)
    _train("code", decoder, Packer(tokenizer), fill, CODE_EXAM, num_steps, folder, lr=lr, seed=seed)


def run_wording(
    *, bundle: Path, tokenizer: Tokenizer, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 6
) -> None:
    """Train the decoder of the code stage further, or that of `bundle` without one. Writes wording.pt into `folder`."""
    torch.manual_seed(seed)
    packer, go_on = Packer(tokenizer), (folder / "code.pt").exists()
    decoder = build_decoder() if go_on else take_decoder(bundle, tokenizer)
    open_gates(decoder)
    if go_on:
        decoder.load_state_dict(trained(folder, "code", "decoder"))
    fill = partial(fill_row, packer=packer)
    _train("wording", decoder, packer, fill, WORDING_EXAM, num_steps, folder, lr=lr, seed=seed, evaluate_every=200)


def _train(
    stage: str,
    decoder: LlamaAdapterDecoder,
    packer: Packer,
    fill: Callable[[Scene, np.random.Generator], list[Question]],
    exam: Exam,
    num_steps: int,
    folder: Path,
    *,
    lr: float,
    seed: int,
    evaluate_every: int = 400,
) -> None:
    """Train a decoder with open gates, together with a new focus head. `fill` gives the questions of a row."""
    code = SceneCode()
    prepare(decoder)
    focus = FocusHead(decoder)

    def batch_at(step: int) -> tuple[Tensor, Packed]:
        rng = np.random.default_rng([seed, step])
        scenes = [sample_questions_scene(rng) for _ in range(BATCH)]
        return labels_of(scenes), packer.pack([fill(scene, rng) for scene in scenes])

    train(
        stage,
        {"decoder": decoder, "focus": focus},
        batch_at,
        partial(_compute, code, decoder, focus),
        lr=lr,
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate(code, decoder, packer, exam),
        evaluate_every=evaluate_every,
    )


def evaluate(code: SceneCode, decoder: LlamaAdapterDecoder, packer: Packer, exam: Exam) -> dict[str, float]:
    """Exact match by task, each with the prefix of its part."""
    rng = np.random.default_rng(exam.seed)
    hits: dict[str, list[bool]] = defaultdict(list)
    for prefix, never_drawn, ask in exam.parts:
        for _ in range(exam.num_scenes // 16):
            scenes = [sample_questions_scene(rng, never_drawn=never_drawn) for _ in range(16)]
            packed = packer.pack([ask(scene, rng, count=8) for scene in scenes])
            for task, values in answer_hits(decoder, code(labels_of(scenes)), packed).items():
                hits[prefix + task] += values
    return {task: float(np.mean(values)) for task, values in sorted(hits.items())}


def take_decoder(bundle: Path, tokenizer: Tokenizer) -> LlamaAdapterDecoder:
    """The bundle's decoder for `tokenizer`. A piece that the bundle's tokenizer lacks gets the mean of its parts."""
    model = load_bundle(bundle, dtype=torch.float32)
    state = dict(model.decoder_state)
    if tokenizer.data != model.tokenizer.data:
        parts = _parts(tokenizer, model.tokenizer)
        for name in ("embedding.weight", "head.weight"):
            state[name] = torch.stack([state[name][ids].mean(0) for ids in parts])
    decoder = build_decoder()
    decoder.load_state_dict(state)
    return decoder


def _parts(new: Tokenizer, old: Tokenizer) -> list[list[int]]:
    """For each piece of `new`, the ids that `old` gives for it."""
    pieces, known = (sentencepiece.SentencePieceProcessor(model_proto=each.data) for each in (new, old))
    border = len(known.encode("\n"))
    parts: list[list[int]] = []
    for index in range(new.vocab_size):
        piece = pieces.id_to_piece(index)
        if pieces.is_byte(index) or pieces.is_control(index) or pieces.is_unknown(index):
            parts.append([known.piece_to_id(piece)])
        elif piece[0] == "\u2581":
            parts.append(known.encode(piece[1:]) if len(piece) > 1 else [known.piece_to_id(piece)])
        else:
            parts.append(known.encode(f"\n{piece}")[border:])
    return parts


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


def train_attention(q_BNSH: Tensor, k_BNPH: Tensor, v_BNPH: Tensor, mask_B1SP: Tensor) -> Tensor:
    """Causal attention that adds a bias in place of filling masked scores; this is faster forward and backward."""
    scale = q_BNSH.shape[-1] ** -0.5
    bias_B1SP = torch.zeros_like(mask_B1SP, dtype=q_BNSH.dtype).masked_fill_(~mask_B1SP, -1e9)
    scores_BNSP = ((q_BNSH * scale) @ k_BNPH.transpose(-1, -2)).add_(bias_B1SP)
    heads_BNSH: Tensor = scores_BNSP.softmax(dim=-1) @ v_BNPH
    return heads_BNSH


OPERATORS = replace(ATEN, name="training", causal_attention=train_attention)


def answer_states(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> Tensor:
    """Normed hidden states (number of answer tokens, D) that predict the answers' tokens."""
    prefix = decoder.project_prefix(visual_query_BQD)
    states_BSD: Tensor = decoder(packed.tokens_BS, packed.positions_BS, packed.mask_B1SS, prefix)
    return states_BSD[packed.row_N, packed.column_N]


def prepare(decoder: LlamaAdapterDecoder) -> None:
    """Make a decoder use the operators for training."""
    use_operators(decoder, OPERATORS)
