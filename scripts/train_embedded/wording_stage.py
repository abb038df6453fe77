"""Stage 3: the decoder learns to answer questions in other words, and to refuse questions that it cannot answer."""

from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded import code_stage
from scripts.train_embedded.code_stage import SceneCode, answer_hits, labels_of, open_gates
from scripts.train_embedded.loop import trained
from scripts.train_embedded.packing import Packed, Packer, ask_many
from scripts.train_embedded.questions import Question
from scripts.train_embedded.sizes import build_decoder
from scripts.train_embedded.wordings import outside, reword
from scripts.train_embedded.world import Scene

KNOWN, OUTSIDE = 0.25, 0.12  # shares of questions; all others are reworded
ROW_TOKENS = 170  # tokens of questions and answers, after the shared beginning
CHECK_SEED = 54321


def run(*, bundle: Path, tokenizer: Tokenizer, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 6) -> None:
    """Train the decoder of the code stage further, or that of `bundle` without one. Writes wording.pt into `folder`."""
    torch.manual_seed(seed)
    packer = Packer(tokenizer)
    if (folder / "code.pt").exists():
        decoder = build_decoder()
        open_gates(decoder)
        decoder.load_state_dict(trained(folder, "code", "decoder"))
    else:
        decoder = take_decoder(bundle, tokenizer)
        open_gates(decoder)
    code_stage.train_decoder(
        "wording",
        decoder,
        partial(_batch_at, packer=packer, seed=seed),
        partial(evaluate, packer=packer),
        num_steps,
        folder,
        lr=lr,
        seed=seed,
        evaluate_every=200,
    )


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


def evaluate(
    code: SceneCode, decoder: LlamaAdapterDecoder, packer: Packer, *, num_scenes: int = 160
) -> dict[str, float]:
    """Exact match by task on fresh scenes in symbols.

    The prefix `known-` marks questions in known words; `pair-` marks such questions about scenes with never-drawn
    pairs.
    """
    rng = np.random.default_rng(CHECK_SEED)
    hits: dict[str, list[bool]] = defaultdict(list)
    for prefix, never_drawn, ask in (("known-", "any", ask_many), ("pair-", "with", ask_many), ("", "any", ask_all)):
        for _ in range(num_scenes // 16):
            scenes = [code_stage.sample_questions_scene(rng, never_drawn=never_drawn) for _ in range(16)]
            packed = packer.pack([ask(scene, rng, count=8) for scene in scenes])
            for task, values in answer_hits(decoder, code(labels_of(scenes)), packed).items():
                hits[prefix + task] += values
    return {task: float(np.mean(values)) for task, values in sorted(hits.items())}


def _batch_at(step: int, *, packer: Packer, seed: int) -> tuple[Tensor, Packed]:
    rng = np.random.default_rng([seed, step])
    scenes = [code_stage.sample_questions_scene(rng) for _ in range(code_stage.BATCH)]
    return labels_of(scenes), packer.pack([_fill(scene, packer, rng) for scene in scenes], scenes)


def _fill(scene: Scene, packer: Packer, rng: np.random.Generator) -> list[Question]:
    """Questions with about `ROW_TOKENS` tokens in total, so that rows need little padding."""
    asked, left = list[Question](), ROW_TOKENS
    for question in ask_all(scene, rng, count=2 * code_stage.QUESTIONS):
        prompt, answer = packer.encode(question.text, question.answer)
        if len(prompt) + len(answer) <= left:
            asked.append(question)
            left -= len(prompt) + len(answer) - 1
    return asked
