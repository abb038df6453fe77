"""Packs several questions of one scene into a row.

Rows have a shared beginning, a block mask, restarted positions, and weighted answers.
"""

# B rows, S tokens, N answer tokens and F focus words of the whole batch, K kinds of labels

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llama_adapter.llm.conversation import format_prompt
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded.questions import TASKS, Question, ask
from scripts.train_embedded.world import Scene

# Weights of the tasks. Relations are learned by far the slowest.
TASK_WEIGHTS: dict[str, float] = {
    "caption": 1.5,
    "count": 0.3,
    "count_shape": 1.0,
    "count_color": 1.0,
    "color": 0.7,
    "shape": 0.7,
    "size": 0.7,
    "where": 0.7,
    "exist": 1.2,
    "rel_yn": 2.5,
    "rel_what": 2.4,
}
_AFTER_INSTRUCTION = "\n\n### Response:"
_WEIGHTS = np.asarray([TASK_WEIGHTS[task] for task in TASKS])
_CUMULATED = np.cumsum(_WEIGHTS / _WEIGHTS.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A batch for the decoder. Answer token n is predicted from row_N[n], column_N[n]."""

    tokens_BS: Tensor
    positions_BS: Tensor
    mask_B1SS: Tensor
    row_N: Tensor
    column_N: Tensor
    target_N: Tensor
    weight_N: Tensor  # an answer's tokens share its weight; otherwise captions would outweigh yes and no
    answer_N: Tensor  # the answer in the batch to which a token belongs
    tasks: tuple[str, ...]  # one per answer
    focus_row_F: Tensor  # words that refer to something in the scene
    focus_column_F: Tensor
    focus_label_FK: Tensor


class Packer:
    """Turns scenes with questions into `Packed` batches; caches encoded texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        mark = "What"
        whole = format_prompt(mark)
        self._beginning = tokenizer.encode(whole[: whole.index(mark)])
        self.encode = lru_cache(maxsize=200_000)(self._encode)
        self.end_of = lru_cache(maxsize=20_000)(self._end_of)

    def _encode(self, text: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of (the prompt after the shared beginning, the answer with eos)."""
        prompt = self._tokenizer.encode(format_prompt(text))
        both = self._tokenizer.encode(format_prompt(text) + answer)
        shared = len(self._beginning)
        if prompt[:shared] != self._beginning or both[: len(prompt)] != prompt:
            raise ValueError(f"pieces of {text!r} reach over the borders of the template")
        return prompt[shared:], [*both[len(prompt) :], self._tokenizer.eos_id]

    def _end_of(self, text: str, end: int) -> int:
        """Index, after the shared beginning, of the last token of the word that ends at `text[:end]`."""
        before = format_prompt("")[: -len(_AFTER_INSTRUCTION)]
        return len(self._tokenizer.encode(before + text[:end])) - len(self._beginning) - 1

    def pack(self, questions: Sequence[Sequence[Question]]) -> Packed:
        """One row per sequence of questions."""
        tokens, positions, segments = [], [], []
        said: list[tuple[int, int, int, float, int]] = []  # row, column, target, weight and answer of each token
        tasks: list[str] = []
        focus: list[tuple[int, int, tuple[int, ...]]] = []
        for row, asked in enumerate(questions):
            row_tokens = list(self._beginning)
            shared = len(row_tokens)
            row_positions, row_segments = list(range(shared)), [0] * shared
            for segment, question in enumerate(asked, start=1):
                prompt, answer = self.encode(question.text, question.answer)
                start = len(row_tokens)
                row_tokens += [*prompt, *answer[:-1]]
                length = len(row_tokens) - start
                row_positions += range(shared, shared + length)
                row_segments += [segment] * length
                for end, labels in question.words:
                    focus.append((row, start + self.end_of(question.text, end), labels))
                first, weight = start + len(prompt) - 1, len(answer) ** -0.75
                said += [(row, first + index, token, weight, len(tasks)) for index, token in enumerate(answer)]
                tasks.append(question.task)
            tokens.append(row_tokens)
            positions.append(row_positions)
            segments.append(row_segments)
        rows, columns, targets, weights, answers = zip(*said, strict=True)
        return Packed(
            tokens_BS=torch.from_numpy(_padded(tokens)),
            positions_BS=torch.from_numpy(_padded(positions)),
            mask_B1SS=_block_mask(torch.from_numpy(_padded(segments, fill=99))),
            row_N=torch.tensor(rows),
            column_N=torch.tensor(columns),
            target_N=torch.tensor(targets),
            weight_N=torch.tensor(weights),
            answer_N=torch.tensor(answers),
            tasks=tuple(tasks),
            focus_row_F=torch.tensor([row for row, _, _ in focus], dtype=torch.long),
            focus_column_F=torch.tensor([column for _, column, _ in focus], dtype=torch.long),
            focus_label_FK=torch.tensor([labels for _, _, labels in focus], dtype=torch.long),
        )


def ask_many(scene: Scene, rng: np.random.Generator, *, count: int) -> list[Question]:
    """`count` questions, with tasks drawn by their weights from those that the scene allows."""
    asked: list[Question] = []
    while len(asked) < count:
        task = TASKS[int(np.searchsorted(_CUMULATED, rng.random()))]
        question = ask(scene, task, rng)
        if question is not None:
            asked.append(question)
    return asked


def _padded(rows: Sequence[Sequence[int]], *, fill: int = 0) -> NDArray[np.int64]:
    width = max(map(len, rows))
    out = np.full((len(rows), width), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return out


def _block_mask(segments_BS: Tensor) -> Tensor:
    """True where a token may attend: earlier tokens of its own question or of the shared beginning."""
    size = segments_BS.shape[1]
    causal_SS = torch.ones(size, size, dtype=torch.bool).tril()
    same_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
    shared_B1S = segments_BS[:, None, :] == 0
    return ((same_BSS | shared_B1S) & causal_SS).unsqueeze(1)
