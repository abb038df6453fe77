"""Batches are a function of seed, epoch and step, and their parts add up for any number of ranks; encoders' targets."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from llama_adapter.app.learning.training.asking import TokenRow, TrainExample
from llama_adapter.app.learning.training.batches import (
    BatchOrder,
    ChangedPixels,
    Encodings,
    Lesson,
    drawn_lessons,
    microbatches,
    padded,
    token_shares,
)
from llama_adapter.app.learning.training.job import Optimisation, TrainJob
from llama_adapter.app.learning.training.targets import targets_of
from llama_adapter.llm.training.layout import IGNORED
from tests.app.learning.labelled import tables


def example(*lengths: int) -> TrainExample:
    texts = [str(length) for length in lengths]
    return TrainExample(
        example=tables.example(*texts, instruction="?", task="caption", place="/".join(texts)),
        prompt="?",
        rows=tuple(TokenRow(tuple(range(1, length + 1)), 2) for length in lengths),
    )


@given(st.lists(st.integers(3, 90), min_size=1, max_size=150), st.integers(1, 17), st.integers(0, 3))
def test_each_example_comes_once_in_an_epoch(lengths: list[int], batch_size: int, seed: int) -> None:
    order = BatchOrder(lengths, batch_size=batch_size, seed=seed)
    for epoch in (0, 1):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = Counter(index for step in steps for index in order.at(step))
        assert seen == Counter(range(len(lengths)))
        assert all(order.epoch_of(step) == epoch for step in steps)


def test_epochs_and_seeds_differ_and_steps_need_no_earlier_ones() -> None:
    lengths = [5 + index % 40 for index in range(100)]
    order = BatchOrder(lengths, batch_size=8, seed=1)
    steps = [order.at(step) for step in range(3 * order.steps_per_epoch)]

    assert [BatchOrder(lengths, batch_size=8, seed=1).at(step) for step in (20, 30)] == [steps[20], steps[30]]
    assert steps[: order.steps_per_epoch] != steps[order.steps_per_epoch : 2 * order.steps_per_epoch]
    assert BatchOrder(lengths, batch_size=8, seed=2).at(0) != steps[0]


def test_rows_of_similar_length_are_together() -> None:
    lengths = [10 + 37 * index % 300 for index in range(512)]
    order = BatchOrder(lengths, batch_size=16, seed=0)
    batches = [[lengths[index] for index in order.at(step)] for step in range(order.steps_per_epoch)]
    padding = sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    shuffled = sum(max(lengths) * 16 - sum(lengths[at : at + 16]) for at in range(0, 512, 16))
    assert padding < 0.25 * shuffled
    assert [max(batch) for batch in batches] != sorted(max(batch) for batch in batches)
    # Answers of slightly different length are learnt together.
    lengths = [60 + 3 * (index % 2) for index in range(96)]
    order = BatchOrder(lengths, batch_size=8, seed=0)
    kinds = [{lengths[index] for index in order.at(step)} for step in range(order.steps_per_epoch)]
    assert sum(len(kind) == 2 for kind in kinds) >= len(kinds) - 1


@given(st.lists(st.integers(3, 40), min_size=1, max_size=20), st.integers(1, 7), st.integers(1, 5))
def test_parts_of_all_ranks_are_the_whole_step(lengths: list[int], rows: int, num_ranks: int) -> None:
    examples = [example(length) for length in lengths]
    lessons = drawn_lessons(examples, range(len(examples)), key=(0, 0))
    ranks = [microbatches(lessons, rows=rows, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    counted = [part for parts in ranks for part in parts if part.weight]

    assert len({len(parts) for parts in ranks}) == 1, "every rank computes as often"
    assert all(len(part.rows) <= rows for part in counted)
    assert Counter(one.example.place for part in counted for one in part.examples) == Counter(map(str, lengths))
    wanted = sum(len(one.row.labels) for one in lessons)
    assert sum(part.num_labels for parts in ranks for part in parts) == wanted


def test_labels_begin_at_the_answer_and_the_unknown_token_and_padding_have_none() -> None:
    tokens_BS, labels_BS = padded((TokenRow((1, 7, 8, 0, 2), 3), TokenRow((1, 7, 0, 2), 2, unknown_id=0)))

    no = IGNORED
    assert tokens_BS.tolist() == [[1, 7, 8, 0, 2], [1, 7, 0, 2, 0]]
    assert labels_BS.tolist() == [[no, no, no, 0, 2], [no, no, no, 2, no]]
    assert tokens_BS.dtype == torch.int64


@given(st.sets(st.lists(st.integers(3, 5), max_size=3).map(tuple), min_size=1, max_size=6), st.integers(0, 99))
def test_probabilities_of_tokens_have_the_loss_of_all_answers_on_average(
    texts: set[tuple[int, ...]], seed: int
) -> None:
    rng = random.Random(seed)
    logits: dict[tuple[int, ...], torch.Tensor] = {}

    def loss_of(token: int, before: tuple[int, ...]) -> float:
        logits.setdefault(before, torch.tensor([rng.uniform(-3, 3) for _ in range(6)], dtype=torch.float64))
        return -float(logits[before].log_softmax(0)[token])

    shares = [rng.uniform(0.1, 1) for _ in texts]
    answers = [
        (TokenRow((1, *ids, 2), 1), share / sum(shares)) for ids, share in zip(sorted(texts), shares, strict=True)
    ]
    hard = soft = 0.0
    for row, share in answers:
        likely = token_shares(row, answers)
        assert len(likely) == len(row.labels)
        for place, (label, of_tokens) in enumerate(zip(row.labels, likely, strict=True)):
            before = row.labels[:place]
            hard += share * loss_of(label, before)
            soft += share * sum(part * loss_of(token, before) for token, part in of_tokens.items())
            assert math.isclose(sum(of_tokens.values()), 1)
    assert math.isclose(hard, soft, rel_tol=1e-9)


def test_a_part_with_probabilities_has_those_of_all_labels() -> None:
    rows = [TokenRow((1, 7, 2), 1), TokenRow((1, 0, 8, 2), 1, unknown_id=0)]
    shares = token_shares(rows[0], [(rows[0], 0.75), (TokenRow((1, 9, 2), 1), 0.25)])
    lessons = [Lesson(example(3), rows[0], torch.ones(2, 3), shares), Lesson(example(4), rows[1], torch.zeros(2, 3))]
    (part,) = microbatches(lessons, rows=2)
    assert part.soft.token_LK.tolist() == [[7, 9], [2, 0], [8, 0], [2, 0]]
    assert part.soft.share_LK.tolist() == [[0.75, 0.25], [1, 0], [1, 0], [1, 0]]
    assert part.encoded.mean((1, 2)).tolist() == [1, 0]
    (plain,) = microbatches([Lesson(example(3), rows[0])], rows=2)
    assert plain.soft is plain.encoded is None


def test_a_part_gets_the_encodings_of_its_examples_unless_it_has_visual_queries() -> None:
    asked, encoded_BTC = list[tuple[object, object]](), torch.ones(1, 2, 3)

    class Noted(Encodings):
        def of(self, examples: Sequence[TrainExample], *, key: tuple[int, int] | None = None) -> torch.Tensor:
            asked.append((examples, key))
            return encoded_BTC

    encodings, key = Noted(None, None), (7, 0)
    plain, own = (
        microbatches([Lesson(example(3), TokenRow((1, 7, 2), 1), query_QD)], rows=1)[0]
        for query_QD in (None, torch.zeros(2, 3))
    )
    assert encodings.given(own, key=key) is own
    assert asked == []
    given = encodings.given(plain, key=key)
    assert given.encoded is encoded_BTC
    assert replace(given, encoded=None) == plain
    encodings.given(plain)
    assert asked == [(plain.examples, key), (plain.examples, None)]


def test_the_change_of_a_picture_depends_on_the_epoch_and_not_on_its_batch() -> None:
    random = torch.Generator().manual_seed(0)
    pixels = {digest: torch.rand(8, 8, 3, generator=random) * 255 for digest in "ab"}
    examples = [
        replace(example(3), example=tables.example("x", instruction="?", task="caption", source="p.png", digest=digest))
        for digest in pixels
    ]
    changed = ChangedPixels(SimpleNamespace(get=pixels.get), torch.zeros(1, 8, 8, 3))
    both, alone, later = (
        changed.of(part, key=(7, epoch)) for part, epoch in ((examples, 0), (examples[1:], 0), (examples, 1))
    )
    assert torch.equal(both[1:], alone)
    assert not torch.isclose(both, later).all((1, 2, 3)).any()


def test_all_inputs_of_the_model_are_moved_to_its_device() -> None:
    row, device = TokenRow((1, 7, 2), 1), torch.device("meta")
    (plain,) = microbatches([Lesson(example(3), row)], rows=1)
    (soft,) = microbatches([Lesson(example(3), row, torch.ones(2, 3), ({7: 0.5, 9: 0.5}, {2: 1.0}))], rows=1)
    tokens_BS, labels_BS, encoded, labels = soft.inputs(device)
    moved = [tokens_BS, labels_BS, encoded, labels.token_LK, labels.share_LK]
    assert [(one.device, tuple(one.shape)) for one in moved] == [
        (device, shape) for shape in ((1, 3), (1, 3), (1, 2, 3), (2, 2), (2, 2))
    ]
    assert [one is None for one in plain.inputs(device)] == [False, False, True, True]


def test_several_right_answers_are_drawn_by_epoch() -> None:
    examples = [example(5, 6, 7)] * 8
    epochs = [drawn_lessons(examples, range(8), key=(3, epoch)) for epoch in range(6)]

    assert epochs[0] != epochs[1]
    assert drawn_lessons(examples, range(8), key=(3, 1)) == epochs[1]
    assert {len(row.token_ids) for lessons in epochs for _, row, *_ in lessons} == {5, 6, 7}


def test_the_rate_rises_then_falls_as_a_cosine() -> None:
    job = TrainJob(data=("a",), out="a.pth", optimisation=Optimisation(lr=2.0, warmup=0.1, final_lr=0.1))
    rates = [job.rate_at(step, num_steps=100) for step in range(100)]

    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(2.0 * 0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.2, abs=0.01)


KINDS, COLOURS = ("disc", "ring", "bar"), ("red", "blue")


def asked(picture: int | None, prompt: str, answer: str, **fields: Any) -> TrainExample:
    source = None if picture is None else f"{picture}.png"
    digest = "" if picture is None else str(picture)
    example = tables.example(answer, source=source, digest=digest, **fields)
    return TrainExample(example=example, prompt=prompt, rows=(TokenRow((1, 2, 3), 2),))


def classes(**counts: int) -> list[TrainExample]:
    names = [name for name, count in counts.items() for _ in range(count)]
    return [asked(at, "Which?", name, task="choice", choices=KINDS) for at, name in enumerate(names)]


def each(prompt: str, *answers: str, start: int = 0, **fields: Any) -> list[TrainExample]:
    return [asked(start + at, prompt, answer, **fields) for at, answer in enumerate(answers)]


QUESTIONS = [*each("Colour?", *4 * COLOURS), *each("How many?", *4 * ["2"], *4 * ["3"])]
CAPTIONS = each("Describe.", *4 * ["Two red rings."], *4 * ["a red disc"], task="caption")
CHINESE = each("描述", *4 * ["红色圆"], *4 * ["红色方"], task="caption")
OPEN = [asked(at, f"Question {at}?", "yes") for at in range(8)]
COPIES = [asked(0, "Which?", "disc", task="choice", choices=KINDS), *classes(disc=1, ring=1)]
WHICH = (("Which?", KINDS),)
COUNTS = (("Colour?", ("blue", "red")), ("How many?", ("2", "3")))


@pytest.mark.parametrize(
    ("examples", "groups", "labels"),
    [
        (classes(ring=2, disc=2), WHICH, [[1], [1], [0], [0]]),  # in the order of the choices
        ([*classes(ring=9, disc=1), asked(None, "Why?", "so")], (*WHICH,), [*9 * [[1]], [0]]),  # a text too
        (COPIES, WHICH, [[0], [1]]),
        (QUESTIONS, COUNTS, [[1, 0], [0, 0], [1, 0], [0, 0], [1, 1], [0, 1], [1, 1], [0, 1]]),
        (each("How many?", *4 * ["2"], "3", "4", "5", "6"), (("How many?", ("", "2")),), [*4 * [[1]], *4 * [[0]]]),
        ([*QUESTIONS, asked(0, "Why?", "none")], COUNTS, None),  # little is left out
        ([*QUESTIONS, asked(8, "Why?", "none")], COUNTS, [*8 * [None], [-100, -100]]),
        ([*QUESTIONS, asked(None, "Colour?", "red")], COUNTS, None),  # not of a picture
        (CAPTIONS, tuple(("Describe.", ("", word)) for word in ("two", "rings", "a", "disc")), None),  # all are red
        (CHINESE, (("描述", ("", "圆")), ("描述", ("", "方"))), None),
        (each("Name?", *map(str, range(8))), None, None),
        (classes(ring=8), None, None),
        ([*QUESTIONS, *OPEN], None, None),
        (OPEN, None, None),
        ([*CAPTIONS[:1], *CAPTIONS[4:5]] * 4, None, None),  # copies of two pictures
        ([], None, None),
    ],
    ids=map(str, range(16)),
)
def test_what_recurs_is_learned(examples: list[TrainExample], groups: Any, labels: Any) -> None:
    found = targets_of(examples)
    if groups is None or found is None:
        assert found is groups
        return
    assert [(group.prompt, group.answers) for group in found.groups] == list(groups)  # ranks need one order
    assert found.are_classes == (groups is WHICH)
    shown = found.labels().tolist()
    assert [one if wanted else None for one, wanted in zip(shown, labels or shown, strict=True)] == (labels or shown)


def test_the_loss_is_the_mean_of_the_groups_of_a_picture() -> None:
    found = targets_of([*QUESTIONS, asked(8, "Why?", "none")])
    random = torch.Generator().manual_seed(0)
    logits_BK, wanted_BK = torch.randn(2, 9, 4, generator=random)
    label_BG = found.labels()
    parts = [
        F.cross_entropy(logits_BK[:8, at : at + 2], label_BG[:8, at // 2], label_smoothing=0.1, reduction="none")
        for at in (0, 2)
    ]
    torch.testing.assert_close(
        found.losses(logits_BK, label_BG), torch.cat([(parts[0] + parts[1]) / 2, torch.zeros(1)])
    )
    own_BK = [one_BK.requires_grad_() for one_BK in (wanted_BK.clone(), logits_BK.clone())]
    same, other = (torch.autograd.grad(found.losses(one_BK, wanted_BK).sum(), one_BK)[0] for one_BK in own_BK)
    assert same.abs().max() < 1e-6  # equal logits are the minimum
    assert other.abs().max() > 0.01


def test_answers_are_right_by_the_likeliest_of_their_own_question() -> None:
    found = targets_of([*QUESTIONS, *CAPTIONS])
    prompts = [group.prompt for group in found.groups if group.answers[0]]
    assert prompts == ["Colour?", "How many?"]
    logits_K = torch.zeros(2 * len(found.groups))
    logits_K[1], logits_K[2] = 1.0, 1.0  # red, 2
    held = [asked(0, "Colour?", "red"), asked(0, "How many?", "3"), asked(0, "Describe.", "Two red rings.")]
    assert found.are_right(logits_K.expand(3, -1), held) == [True, False]
