"""The encoder of a small model learns classes: from which data, with the same bits after an interruption."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from llama_adapter import UsageError
from llama_adapter.app.learning.training import eye
from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import NUM_DRAWN, Encodings, Lesson, Views, augmented, drawn_lessons
from llama_adapter.app.learning.training.eye import Eye, is_small
from llama_adapter.app.learning.training.job import Optimisation, TrainingChoice, TrainJob
from llama_adapter.app.learning.training.loop import TrainProgress
from llama_adapter.app.learning.training.model import TrainableModel, open_trainable
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.learning.training.ranks import OneRank
from llama_adapter.app.learning.training.stepping import Muon
from llama_adapter.app.learning.training.targets import targets_of
from llama_adapter.app.models.resources import start_tower
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.vision.config import VIT_L_14, QueryConfig, VisionConfig
from llama_adapter.vision.towers import clip_tensors, read_clip
from tests.app.learning.training.pets import draw_pets, prepared

SIZE = 224


class Pictures(Encodings):
    """Pixels of files, without a cache."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def of(self, examples: Sequence[TrainExample], *, random: torch.Generator | None = None) -> Tensor:
        return torch.stack([read(one) for one in examples])


def read(example: TrainExample) -> Tensor:
    source = example.example.item.source
    if source is None:
        return torch.zeros(SIZE, SIZE, 3, dtype=torch.uint8)
    return torch.from_numpy(np.array(Image.open(source).resize((SIZE, SIZE))))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainJob]:
    folder = tmp_path_factory.mktemp("eye")
    draw_pets(folder / "pets", each=5)
    choice, optimisation = TrainingChoice(sets=("bias", "vision", "head")), Optimisation(tower_epochs=3)
    job = TrainJob(
        data=(str(folder / "pets"),), out=str(folder / "a.pth"), choice=choice, optimisation=optimisation
    ).with_rate(width=192)
    job.folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eye, "_FEWEST_BLOCK_STEPS", 3)
        patch.setattr(eye, "_MOST_VIEWS", 4)
        yield job


@pytest.fixture(scope="module")
def data(job: TrainJob) -> TrainingData:
    return prepared(job)


def opened(job: TrainJob, data: TrainingData, *, run: str = "run") -> tuple[TrainableModel, Eye]:
    model = open_trainable(CaptionerSpec(), job.choice, dtype=torch.float32, device="cpu", seed=0)
    return model, Eye(model, targets_of(data.train), encodings=Pictures(), job=job, run=run, ranks=OneRank())


class Trained(NamedTuple):
    model: TrainableModel
    eye: Eye
    views: Views
    counts: dict[str, int]  # of what is trained, before it was
    told: list[str]  # to the progress


@pytest.fixture(scope="module")
def trained(job: TrainJob, data: TrainingData) -> Trained:
    model, found = opened(job, data)
    counts, told = model.counts(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainProgress, "step", lambda self, done, **values: told.append(str(done)))
        patch.setattr(TrainProgress, "begin_stage", lambda self: told.append("stage"))
        assert train(found)
    return Trained(model, found, found.finished(data), counts, told)


def train(found: Eye, *, asked: Callable[[], bool] = lambda: False) -> bool:
    return found.train(TrainProgress(visible=False, num_steps=found.num_steps, every=None), is_asked_to_end=asked)


def test_the_time_left_is_estimated_again_with_the_visual_blocks(trained: Trained) -> None:
    assert trained.told == ["1", "2", "3", "stage", "4", "5", "6"]


def weights(model: TrainableModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.vision.state_dict().items()}


def test_an_interrupted_training_goes_on_with_the_same_bits(
    trained: Trained, job: TrainJob, data: TrainingData
) -> None:
    eye_file, wanted = job.folder / eye.EYE, weights(trained.model)
    for num_steps in (1, 4):  # of three in the tower and three in the visual blocks; the rate is 0 in the last ones
        eye_file.unlink()
        before, first = opened(job, data)
        matrices = {name: one for name, one in weights(before).items() if name.endswith("qkv.weight")}
        assert not any(torch.equal(one, wanted[name]) for name, one in matrices.items())
        left = iter([False] * (num_steps - 1))
        assert not train(first, asked=lambda left=left: next(left, True))
        assert eye_file.is_file()
        again, second = opened(job, data)
        second.resume()
        assert train(second)
        assert all(torch.equal(one, wanted[name]) for name, one in weights(again).items())
    with pytest.raises(UsageError, match="another model, data, examples, settings or version"):
        opened(job, data, run="another")[1].resume()


def test_only_the_embedded_tower_starts_from_another(job: TrainJob, data: TrainingData) -> None:
    model, found = opened(job, data)
    assert all(
        torch.equal(found._tower.parameters[name], one.float()) for name, one in load_file(start_tower()).items()
    )
    with torch.no_grad():
        model.vision.clip.class_embedding.mul_(2)
    before = weights(model)
    Eye(model, targets_of(data.train), encodings=Pictures(), job=job, run="run", ranks=OneRank())
    assert all(torch.equal(one, before[name]) for name, one in weights(model).items())


def test_a_trained_tower_computes_the_same_at_both_sizes_and_is_written_with_openais_names(
    trained: Trained, data: TrainingData
) -> None:
    model, found, views, counts, _ = trained
    with torch.no_grad():
        whole_BTC = model.vision.features(Pictures().of(data.train))
        half_BTC = found._features(found._pixels(data.train))
        query_BQD = model.vision(Pictures().of(data.train))
    error = (whole_BTC - half_BTC).abs().max() / whole_BTC.abs().max()
    assert error < 1e-4  # sums of 2,352 products in another order
    assert (views.of(data.train) - query_BQD).abs().max() < 1e-4 * query_BQD.abs().max()
    assert model.encodes == "visual_query"
    assert not any(name.startswith(("clip.", "visual.")) for name in model.trained())
    assert model.counts() == counts

    written = model.adapter_tensors()
    clip = {name.removeprefix("clip."): one for name, one in written.items() if name.startswith("clip.")}
    assert "visual.transformer.resblocks.0.attn.in_proj_weight" in clip
    assert "llama.output.weight" in written
    state = {name.removeprefix("clip."): one for name, one in weights(model).items() if name.startswith("clip.")}
    again = read_clip(clip, name="a.pth").tensors
    assert all(torch.equal(again[f"clip.{name}"], one) for name, one in state.items())
    assert clip_tensors(state, model.vision_config.clip)[0].keys() == clip.keys()


def test_towers_of_at_most_20_million_weights_are_small() -> None:
    query = QueryConfig(num_queries=10, width=64, depth=1, num_heads=1, mlp_dim=64, output_dim=64)
    assert not is_small(None)
    assert not is_small(VisionConfig(clip=VIT_L_14, query=query))
    assert is_small(VisionConfig(clip=dataclasses.replace(VIT_L_14, width=192, num_layers=4), query=query))


def test_augmentation_depends_on_the_numbers_and_keeps_a_plain_picture_plain() -> None:
    plain_BCSS = torch.full((4, 3, 32, 32), 100.0)
    changed = [augmented(plain_BCSS, torch.full((NUM_DRAWN, 4), share)) for share in (0.1, 0.1, 0.2)]
    assert torch.equal(changed[0], changed[1])
    assert not torch.equal(changed[0], changed[2])
    assert changed[0].flatten(1).std(1).max() < 1e-3
    assert changed[0].min() >= 0
    assert changed[0].max() <= 255
    random = torch.Generator().manual_seed(0)
    noise_BCSS = torch.rand(2, 3, 32, 32, generator=random) * 255
    assert (augmented(noise_BCSS, torch.rand(NUM_DRAWN, 2, generator=random)) - noise_BCSS).abs().mean() > 10


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_updates_as_torchs_does(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(shape)) for _ in range(2)]
    ours = Muon(weights[:1], weight_decay=0.01)
    ours.param_groups[0]["lr"] = 0.1
    theirs = torch.optim.Muon(weights[1:], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(shape, generator=random)
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(weights[0], weights[1], rtol=0.02, atol=0.02)  # torch computes in bfloat16


def test_texts_beside_pictures_have_one_view_and_are_not_judged(trained: Trained, data: TrainingData) -> None:
    found, one = trained.eye, data.train[0].example
    item = dataclasses.replace(one.item, source=None)
    text = dataclasses.replace(data.train[0], example=dataclasses.replace(one, item=item, digest=""))
    assert found.are_right([*65 * [text], *data.train]) == found.are_right(data.train)
    assert found.are_right([text]) == []
    views = found.finished(dataclasses.replace(data, train=(text, *data.train)))
    lesson = Lesson(text, text.rows[0])
    for seed in range(9):
        (taught,) = views.taught((lesson,), random=torch.Generator().manual_seed(seed))
        assert torch.equal(taught.query_QD, views.of([text])[0])
        assert taught._replace(query_QD=None) == lesson


def test_the_decoder_learns_from_means_of_two_views_what_the_encoder_finds_and_both_right_answers(
    trained: Trained, data: TrainingData
) -> None:
    views = trained.views
    lessons = drawn_lessons(data.train, range(len(data.train)), key=(0, 0))
    drawn = [views.taught(lessons, random=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    queries = [torch.stack([one.query_QD for one in part if one.query_QD is not None]) for part in drawn]
    assert torch.equal(queries[0], queries[1])
    assert not torch.equal(queries[0], queries[2])
    assert [one.row for one in drawn[0]] == [one.row for one in drawn[1]]
    stored = torch.cat(list(views._views_VQD.values()))
    rows = {one.example.answers[0]: one.rows[0] for one in data.train}
    for lesson, taught, query_QD, share_of in zip(
        lessons, drawn[0], queries[0], trained.eye._teacher(data.train, queries[0]), strict=True
    ):
        assert not (stored == query_QD).flatten(1).all(1).any()
        assert sum(share_of.values()) == pytest.approx(1)
        assert taught.row in rows.values()
        own = lesson.example.example.answers[0]
        first = taught.shares[0]  # the classes differ in their first token
        for answer, share in share_of.items():
            label = rows[answer].labels[0]
            right = first[label] - 0.5 * share
            assert (0.25 if answer == own else 0) - 1e-6 <= right <= (0.5 if answer == own else 0.25) + 1e-6
        assert sum(first.values()) == pytest.approx(1)


def test_only_questions_with_a_group_of_answers_are_taught_and_only_by_numbers(
    trained: Trained, data: TrainingData, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = trained.views
    other = dataclasses.replace(data.train[0], prompt="What else?")
    (taught,) = views.taught((Lesson(other, other.rows[0]),), random=torch.Generator().manual_seed(0))
    assert taught.row == other.rows[0]
    assert taught.shares is None
    own = list(views._views_VQD[other.example.digest])
    assert any(torch.equal(one, taught.query_QD) for one in own if taught.query_QD is not None)
    monkeypatch.setattr(trained.eye._teacher, "_head", lambda query_BD: torch.full((len(query_BD), 2), torch.nan))
    (taught,) = views.taught((Lesson(data.train[0], other.rows[0]),), random=torch.Generator().manual_seed(0))
    assert taught.shares is None
