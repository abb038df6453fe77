"""Metrics of captions: BLEU, ROUGE-L and CIDEr-D, in the variants of COCO's evaluation server.

Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation" (2002); Lin, "ROUGE: A Package for
Automatic Evaluation of Summaries" (2004); Vedantam et al., "CIDEr: Consensus-based Image Description Evaluation"
(2015), which defines CIDEr-D; Chen et al., "Microsoft COCO Captions: Data Collection and Evaluation Server" (2015). N
captions, K orders of n-grams.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llama_adapter.app.learning.scores.outcome import Floats, Ints, Outcome

MAX_ORDER: Final = 4
_ORDERS: Final = range(1, MAX_ORDER + 1)
_ROUGE_BETA: Final = 1.2  # weight of recall
_CIDER_SIGMA: Final = 6.0  # in tokens, for the penalty on a different length
_CIDER_SCALE: Final = 10.0

Ngram = tuple[str, ...]
Tokens = tuple[str, ...]

# Words include inner hyphens, points and slashes; numbers also colons and commas. Parts of contractions are words: do
# n't, can not. Characters of Japanese and Chinese are words. Vowels of Hindi, Thai and Arabic are marks, not in `\w`.
_CLITIC: Final = re.compile(r"(n't|'(?:s|m|d|re|ve|ll)|(?<=\bcan)not|(?<=\bgo[nt]|\bwan)[nt]a|(?<=\bgim|\blem)me)\b")
_MARKS: Final = "".join(mark for mark in map(chr, range(0x300, 0x2000)) if unicodedata.category(mark)[0] == "M")
_LETTERS: Final = rf"[^\W\u3040-\u9fff](?:[^\W\u3040-\u9fff]|[{_MARKS}])*"
_NUMBER: Final = r"(?<!\w)\d+(?:[:,]\d+)+(?:\.\d+)?"
_WITHIN: Final = rf"[-./]{_LETTERS}|(?<=\bo)'clock\b"
_WORD: Final = re.compile(rf"n't\b|'(?:s|m|d|re|ve|ll)\b|(?=\w)[\u3040-\u9fff]|{_NUMBER}|{_LETTERS}(?:{_WITHIN})*")


def tokens_of(text: str) -> Tokens:
    """Words in lower case, without punctuation. Contractions are split as in the Penn Treebank."""
    text = _CLITIC.sub(r" \1", unicodedata.normalize("NFC", text.lower()).replace("’", "'"))
    return tuple(_WORD.findall(text))


def ngrams(tokens: Tokens, order: int) -> Counter[Ngram]:
    """The number of occurrences of each n-gram of one order."""
    return Counter(tokens[start : start + order] for start in range(len(tokens) - order + 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionScores:
    """The counts that corpus BLEU sums, and the scores of each caption."""

    matches_NK: Floats  # n-grams of the caption that a reference has, clipped
    totals_NK: Floats  # n-grams of the caption; those of order 1 are its tokens
    closest_N: Floats  # tokens of the reference with the closest length; of two, the shorter one
    rouge_N: Floats
    cider_N: Floats


def caption_scores(outcomes: Sequence[Outcome]) -> CaptionScores:
    """Counts and scores of each outcome's answer, compared with its references."""
    captions = [tokens_of(one.answer) for one in outcomes]
    references = [[tokens_of(text) for text in one.references] for one in outcomes]
    matches = np.zeros((len(captions), MAX_ORDER))
    totals = np.zeros((len(captions), MAX_ORDER))
    closest = np.zeros(len(captions))
    for index, (caption, right) in enumerate(zip(captions, references, strict=True)):
        closest[index] = min((abs(len(one) - len(caption)), len(one)) for one in right)[1]
        for order in _ORDERS:
            most: Counter[Ngram] = Counter()
            for one in right:
                most |= ngrams(one, order)
            own = ngrams(caption, order)
            matches[index, order - 1] = (own & most).total()
            totals[index, order - 1] = own.total()
    return CaptionScores(
        matches_NK=matches,
        totals_NK=totals,
        closest_N=closest,
        rouge_N=np.array([rouge_l(*pair) for pair in zip(captions, references, strict=True)], dtype=np.float64),
        cider_N=cider_d(captions, references),
    )


def bleu(counts: CaptionScores, chosen: Ints, *, order: int) -> float:
    """Corpus BLEU of the `chosen` captions, at least one, with n-grams up to `order`, 0 to 1, unsmoothed."""
    matches = counts.matches_NK[chosen, :order].sum(axis=0)
    totals = counts.totals_NK[chosen, :order].sum(axis=0)
    if not matches.all():
        return 0.0
    brevity = min(0.0, 1.0 - float(counts.closest_N[chosen].sum() / totals[0]))
    return math.exp(brevity + float(np.log(matches / totals).mean()))


def rouge_l(caption: Tokens, references: Sequence[Tokens]) -> float:
    """F-measure of the longest common subsequence, 0 to 1, from the best precision and recall of the references."""
    common = [_longest_common(caption, one) for one in references]
    precision = max(common) / len(caption) if caption else 0.0
    recall = max(length / len(one) if one else 0.0 for length, one in zip(common, references, strict=True))
    if not precision or not recall:
        return 0.0
    weight = _ROUGE_BETA**2
    return (1 + weight) * precision * recall / (recall + weight * precision)


def cider_d(captions: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> Floats:
    """CIDEr-D of each caption, (N,), 0 to 10. The weights of n-grams come from all `references`.

    With a single example the score is 0, because an n-gram that all examples have gets the weight 0.
    """
    documents: Counter[Ngram] = Counter()
    for right in references:
        documents.update({ngram for one in right for order in _ORDERS for ngram in ngrams(one, order)})
    log_count = math.log(len(references)) if references else 0.0

    def weighted(tokens: Tokens, order: int) -> dict[Ngram, float]:
        return {
            ngram: count * (log_count - math.log(max(1, documents[ngram])))
            for ngram, count in ngrams(tokens, order).items()
        }

    scores = np.zeros(len(captions))
    for index, (caption, right) in enumerate(zip(captions, references, strict=True)):
        own = [weighted(caption, order) for order in _ORDERS]
        for one in right:
            penalty = math.exp(-((len(caption) - len(one)) ** 2) / (2 * _CIDER_SIGMA**2))
            similar = sum(_similarity(own[order - 1], weighted(one, order)) for order in _ORDERS)
            scores[index] += _CIDER_SCALE * penalty * similar / (MAX_ORDER * len(right))
    return scores


def caption_figures(scores: CaptionScores, chosen: Ints) -> dict[str, float]:
    """Name -> metric for the `chosen` examples. CIDEr-D uses the weights that n-grams have in all examples."""
    found = {f"BLEU-{order}": bleu(scores, chosen, order=order) for order in _ORDERS}
    return found | {"ROUGE-L": float(scores.rouge_N[chosen].mean()), "CIDEr-D": float(scores.cider_N[chosen].mean())}


def _longest_common(one: Tokens, other: Tokens) -> int:
    """The length of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            above = best[place]
            best[place] = diagonal + 1 if token == candidate else max(above, best[place - 1])
            diagonal = above
    return best[-1]


def _similarity(own: dict[Ngram, float], right: dict[Ngram, float]) -> float:
    """The cosine of two weighted vectors, with the weights of the caption clipped to those of the reference."""
    norm = math.hypot(*own.values()) * math.hypot(*right.values())
    if not norm:
        return 0.0
    return sum(min(weight, right[ngram]) * right[ngram] for ngram, weight in own.items() if ngram in right) / norm
