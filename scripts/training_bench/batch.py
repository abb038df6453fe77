"""A LLaMA with random weights, and a batch of random tokens, equal for both programs."""

# B rows, S places

from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.app.models.random_model import VOCABULARY, LlamaSize, parse_size
from llama_adapter.llm.weights.names import LlamaSource, SplitTensor, llama_shapes

LONGEST_PROMPT = 70
ANSWER = (10, 20)  # minimum and maximum, in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Padded rows: tokens and labels int64 (B, S). Padding is 0, and so is every label that does not count."""

    tokens_BS: Tensor
    labels_BS: Tensor

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return int((self.tokens_BS != 0).sum())

    @property
    def num_labels(self) -> int:
        """The number of labels that count."""
        return int((self.labels_BS[:, 1:] != 0).sum())


def random_batch(num_rows: int) -> Batch:
    """A batch with prompts of 60 to 70 tokens and answers of 10 to 20 tokens."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(LONGEST_PROMPT - 10, LONGEST_PROMPT + 1, (num_rows,), generator=random).tolist()
    answers = torch.randint(ANSWER[0], ANSWER[1] + 1, (num_rows,), generator=random).tolist()
    length = max(prompt + answer for prompt, answer in zip(prompts, answers, strict=True))
    tokens_BS, labels_BS = (torch.zeros(num_rows, length, dtype=torch.int64) for _ in range(2))
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens_BS[row, : prompt + answer] = torch.randint(3, VOCABULARY, (prompt + answer,), generator=random)
        labels_BS[row, prompt : prompt + answer] = tokens_BS[row, prompt : prompt + answer]
    return Batch(tokens_BS=tokens_BS, labels_BS=labels_BS)


def random_llama(name: str) -> LlamaSource:
    """A LLaMA with the named size, in memory in float32; the rows of q and k are in Hugging Face's order."""
    size: LlamaSize = parse_size(name)
    sizes = {"vocab_size": VOCABULARY, "dim": size.dim, "num_layers": size.num_layers, "ffn_dim": size.ffn_dim}
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, SplitTensor] = {}
    for key, shape in llama_shapes(**sizes).items():
        is_norm = len(shape) == 1
        values = torch.ones(shape) if is_norm else torch.randn(shape, generator=random) * shape[-1] ** -0.5
        tensors[key] = SplitTensor((values,))
    return LlamaSource(
        name=f"random {name}",
        num_heads=size.num_heads,
        norm_eps=1e-6,
        rope_theta=10000.0,
        half_split=True,
        tensors=tensors,
        files=(),
        vocab_size=VOCABULARY,
        dim=size.dim,
        num_layers=size.num_layers,
        ffn_dim=size.ffn_dim,
    )
