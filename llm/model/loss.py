"""The training loss of LLaMA-Adapter."""

import torch
from torch import Tensor
from torch.nn import functional as F

# B rows, S tokens, V vocabulary

IGNORED_LABEL = 0  # padding and prompt in the reference; also the unknown token's id, which is never a label


def next_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross entropy of logits at t against labels at t + 1, over the whole batch; a float32 scalar.

    Labels equal to 0 are ignored; if all are, the loss is exactly 0.
    """
    targets = labels_BS[:, 1:].flatten()
    if not bool((targets != IGNORED_LABEL).any()):
        return (logits_BSV * 0.0).sum(dtype=torch.float32)
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), targets, ignore_index=IGNORED_LABEL)
