"""The embedded model's tokenizer: a corpus of its own sentences, and the SentencePiece training on this corpus."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from llama_adapter.llm.conversation import format_prompt
from scripts.train_embedded.grammar import OUTSIDE_ANSWER
from scripts.train_embedded.questions import TASKS, ask, plural
from scripts.train_embedded.sizes import VOCABULARY
from scripts.train_embedded.wordings import outside, reword
from scripts.train_embedded.world import COLOR_NAMES, POSITIONS, SHAPES, sample_scene


def corpus(*, num_questions: int, seed: int = 3) -> Iterator[str]:
    """Yields prompts with answers as in training, and every word of the world often enough to become one piece."""
    rng = np.random.default_rng(seed)
    words = [*SHAPES, *map(plural, SHAPES), *COLOR_NAMES, *" ".join(POSITIONS).split(), "yes", "no", "Yes", "No"]
    words += ["zero", "one", "two", "three", "large", "small", "objects", "object", "picture", "color", "and", "in"]
    words += ["to", "red", "hearts", "shape", "this", "image", "What", "Where", "at"]
    for number in range(num_questions):
        scene = sample_scene(rng, placed=False)
        question = ask(scene, TASKS[int(rng.integers(len(TASKS)))], rng)
        if number % 4 == 0:
            yield format_prompt("").replace("\n", " ")
        if question is not None:
            # Questions and answers follow a line feed or a colon, so their first word has no space before it. A colon
            # never merges with letters.
            yield f":{question.text}"
            yield f":{question.answer}"
            for _ in range(2):
                yield f":{reword(question, scene, rng).text}"
            if number % 4 == 1:
                yield f":{outside(rng).text}"
        if number % 20 == 2:
            yield f":{OUTSIDE_ANSWER}"
        yield " ".join(
            f"{first} :{second}"
            for first, second in zip(rng.permutation(words)[:4], rng.permutation(words), strict=False)
        )


def train_tokenizer(path: Path, *, num_questions: int = 40_000) -> None:
    """Write `tokenizer.model`: BPE with byte fallback and identity normalisation, so that line feeds survive."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus(num_questions=num_questions),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())
