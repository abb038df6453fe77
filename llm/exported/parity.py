"""Compares an exported decoder with torch's: logits of the same tokens, and the tokens that both choose."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from llama_adapter.llm.exported.program import DecoderProgram
from llama_adapter.llm.exported.step import decode_step, prefill_step
from llama_adapter.llm.prefix import PictureTokens
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner

_LENGTHS: Final = (3, 9, 17)  # tokens of the prompts, which are random
_NUM_STEPS: Final = 12
# Differences come from the order of summation (float32), rounding of activations (float16) and rounding of weights (8
# and 4 bits). How much the latter changes the logits depends on the model, so it has no bound and is only reported.
BOUNDS: Final = {"float32": 1e-3, "float16": 5e-2}  # of the largest difference, for logits of magnitude 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderParity:
    """Differences of logits over all steps, and the number of tokens that are the same."""

    max_abs: float
    mean_abs: float
    magnitude: float  # root mean square of torch's logits, at least 1
    num_same: int
    num_tokens: int

    def is_ok(self, precision: str) -> bool:
        """Whether the largest difference is within the bound of `precision`, a number format of an export."""
        limit = BOUNDS.get(precision, np.inf) * self.magnitude
        return bool(np.isfinite(self.max_abs)) and self.max_abs <= limit


def compare(program: DecoderProgram, reference: EagerRunner | KernelRunner) -> DecoderParity:
    """Compare both on the same prompts of different lengths, pictures and tokens. Both must have at least 3 slots.

    Pictures that are tokens have the place of all tokens of a prompt but the first and the last.
    """
    sizes, rng = reference.config.decoder, np.random.default_rng(0)
    prompts = [rng.integers(0, sizes.vocab_size, min(length, sizes.context // 2)).tolist() for length in _LENGTHS]
    query_BQD = rng.standard_normal((len(prompts), sizes.num_queries, sizes.dim)).astype(np.float32)
    prefixes = reference.project_prefix(torch.from_numpy(query_BQD))
    whole = program.project(query_BQD.astype(program.card.dtype))
    own = [type(whole)(whole.k[:, row : row + 1], whole.v[:, row : row + 1]) for row in range(len(prompts))]
    greedy = [None] * len(prompts)
    program.slots.reserve(max(map(len, prompts)) + _NUM_STEPS)
    program.slots.place(own, first_slot=0)
    pictures = []
    if program.card.picture_format is not None:
        shown = (rng.standard_normal((max(len(prompt) - 2, 0), sizes.dim), np.float32) for prompt in prompts)
        pictures = [(PictureTokens(start=1, embeddings_SD=x_SD, digest=""),) for x_SD in shown]
    wanted = reference.prefill(prompts, prefixes, first_slot=0, pictures=pictures)
    step = prefill_step(prompts, greedy, capacity=program.slots.capacity, pictures=pictures)
    made = program.run(step, first_slot=0)
    pairs = [(torch.as_tensor(wanted.logits_RV).numpy().copy(), made.logits_RV.copy())]
    num_same = int((torch.as_tensor(wanted.best_R).numpy() == made.best_R).sum())
    token_ids, positions = wanted.best_R.tolist(), [len(prompt) for prompt in prompts]
    num_steps = max(min(_NUM_STEPS, sizes.context - max(positions)), 0)
    for _ in range(num_steps):
        wanted = reference.decode(token_ids, positions)
        made = program.run(decode_step(token_ids, positions, greedy, capacity=program.slots.capacity), first_slot=0)
        pairs.append((torch.as_tensor(wanted.logits_RV).numpy().copy(), made.logits_RV.copy()))
        num_same += int((torch.as_tensor(wanted.best_R).numpy() == made.best_R).sum())
        token_ids, positions = wanted.best_R.tolist(), [position + 1 for position in positions]
    torchs, graphs = (np.concatenate(side) for side in zip(*pairs, strict=True))
    difference = np.abs(torchs - graphs)
    return DecoderParity(
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        magnitude=max(1.0, float(np.sqrt(np.mean(torchs**2)))),
        num_same=num_same,
        num_tokens=len(prompts) * (1 + num_steps),
    )
