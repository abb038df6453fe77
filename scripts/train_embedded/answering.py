"""Loss and exact-match scores of the decoder on packed questions, given visual queries."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from scripts.train_embedded.packing import Packed


def answer_loss(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> Tensor:
    """Weighted cross entropy of all answer tokens, per answer."""
    logits_NV = _answer_logits(decoder, visual_query_BQD, packed)
    losses_N = F.cross_entropy(logits_NV, packed.target_N, reduction="none")
    return (losses_N * packed.weight_N).sum() / len(packed.tasks)


@torch.no_grad()
def answer_hits(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> dict[str, list[bool]]:
    """By task, whether each answer is right from the first token to the end, as in greedy decoding."""
    logits_NV = _answer_logits(decoder, visual_query_BQD, packed)
    wrong_N = (logits_NV.argmax(-1) != packed.target_N).long()
    wrong_per_answer = torch.zeros(len(packed.tasks), dtype=torch.long).index_add(0, packed.answer_N, wrong_N)
    hits: dict[str, list[bool]] = defaultdict(list)
    for task, wrong in zip(packed.tasks, wrong_per_answer.tolist(), strict=True):
        hits[task].append(wrong == 0)
    return dict(hits)


def exact_match(decoder: LlamaAdapterDecoder, batches: Iterable[tuple[str, Tensor, Packed]]) -> dict[str, float]:
    """Share of right answers by task. A batch is a prefix for the names of its tasks, visual queries, and questions."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for prefix, visual_query_BQD, packed in batches:
        for task, values in answer_hits(decoder, visual_query_BQD, packed).items():
            hits[prefix + task] += values
    return {task: float(np.mean(values)) for task, values in sorted(hits.items())}


def _answer_logits(decoder: LlamaAdapterDecoder, visual_query_BQD: Tensor, packed: Packed) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prefix = decoder.project_prefix(visual_query_BQD)
        hidden_BSD = decoder(packed.tokens_BS, packed.positions_BS, packed.mask_B1SS, prefix)
        return decoder.logits(hidden_BSD[packed.row_N, packed.column_N])
