"""Bundles that are opened without torch: they are bit for bit as those that torch opens, or torch opens them."""

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.app.captioning.assemble import assemble_parts
from llama_adapter.app.captioning.assemble_arrays import assemble_arrays
from llama_adapter.app.models.bundle import load_bundle, save_bundle
from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.prefix import Prefix
from llama_adapter.runtime.schemes import PRECISIONS
from tests.app.models.bundles import edit, edit_tensors, older_int4
from tests.llm.toys import NEEDS_KERNELS

PROMPTS = [[1, 5, 7, 9, 11, 13], [1, 600, 3]]


pytestmark = NEEDS_KERNELS


def spec_of(**options: Any) -> CaptionerSpec:
    return CaptionerSpec(**{"device": "cpu", "batch_size": 2, **options})


def assert_same(spec: CaptionerSpec) -> None:
    """Both ways give the same description, the same weights, and the same numbers."""
    ours, wanted = assemble_arrays(spec), assemble_parts(spec)
    assert ours is not None
    assert (ours.spec, ours.info) == (wanted.spec, wanted.info)
    assert (ours.model.ood_detector is None) == (wanted.model.ood_detector is None)
    runners: Any = ours.runner, wanted.runner
    for one, other in zip(*(runner._kernels.linears for runner in runners), strict=True):
        for part in ("_weight", "_scale", "_bias"):
            assert np.array_equal(getattr(one, part), getattr(other, part)), part
    width = (runners[0].config.decoder.num_queries, runners[0].config.decoder.dim)
    queries = [np.random.default_rng(0).normal(size=(2, *width)).astype(np.float32)] * 2
    if ours.info.has_adapter:
        side = wanted.vision.pixels.image_size
        pixels_BHWC = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
        queries = [np.asarray(parts.vision.encode(pixels_BHWC)) for parts in (ours, wanted)]
        assert np.array_equal(*queries)
    logits = []
    for runner, queries_BQD in zip(runners, queries, strict=True):
        prefix = runner.project(queries_BQD)
        prefixes = [Prefix(*(part[:, row : row + 1] for part in prefix)) for row in range(2)]
        logits.append(runner.prefill(PROMPTS, prefixes, first_slot=0).logits_RV)
    assert np.array_equal(*logits)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_embedded_model_is_the_same_in_all_number_formats(dtype: str, precision: Any) -> None:
    assert_same(spec_of(dtype=dtype, precision=precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_stored_and_packed_weights_are_the_same(tmp_path: Path, precision: Any) -> None:
    packed = pack_bundle(PackJob(out=str(tmp_path / "packed"), precision=precision))
    assert_same(spec_of(model=str(packed)))
    if precision == "float":
        stored = save_bundle(tmp_path / "stored", model=load_bundle(embedded_model(), dtype=torch.bfloat16))
    else:
        stored = quantise_bundle(QuantiseJob(out=str(tmp_path / "stored"), precision=precision))
    assert_same(spec_of(model=str(stored)))
    assert_same(spec_of(model=str(stored), dtype="bfloat16", precision="float"))
    if precision == "int4":
        older = str(older_int4(tmp_path / "older"))
        assert_same(spec_of(model=older))
        assert_same(spec_of(model=str(pack_bundle(PackJob(model=older, out=str(tmp_path / "older-packed"))))))


def test_other_settings_and_a_model_for_texts_are_the_same(tmp_path: Path) -> None:
    assert_same(spec_of(channel_order="bgr", context=64, batch_size=3, device="auto"))
    texts = dataclasses.replace(load_bundle(embedded_model()), vision_state={}, ood_detector=None)
    assert_same(spec_of(model=str(save_bundle(tmp_path / "texts", model=texts))))


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float16"}, {"batch_size": "auto"}, {"operators": "aten"}, {"device": "cuda"}, {"context": 10**11}],
    ids=str,
)
def test_torch_opens_what_the_kernels_do_not_compute(options: dict[str, Any]) -> None:
    assert assemble_arrays(spec_of(**options)) is None


DOWN = "layers.0.feed_forward.down.weight"


def write_head(head: bytes, place: Path) -> None:
    size = (place / "llm.safetensors").stat().st_size
    (place / "llm.safetensors").write_bytes((len(head).to_bytes(8, "little") + head).ljust(size))


@pytest.mark.parametrize(
    "damage",
    [
        edit_tensors(lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()})),
        edit_tensors(lambda tensors: tensors.pop("norm.weight")),
        edit_tensors(lambda tensors: tensors.pop("layers.0.attention.qkv.bias")),
        edit_tensors(lambda tensors: tensors.update({"head.bias": torch.ones(1024).half()})),
        edit_tensors(lambda tensors: tensors.pop("layers.1.attention_norm.weight")),
        edit_tensors(lambda tensors: tensors.update(more=torch.ones(2).half())),
        edit_tensors(lambda tensors: tensors.update({"norm.weight": torch.ones(192)})),
        edit_tensors(lambda tensors: tensors.update({"norm.weight": torch.ones(96).half()})),
        edit(lambda manifest: manifest.update(dtype="bfloat16")),
        *(partial(write_head, head) for head in (b"[]", b"5", b"[" * 100_000)),
        lambda place: (place / "tokenizer.model").unlink(),
        lambda place: (place / "manifest.json").write_text("{}"),
    ],
)
def test_torch_tells_what_is_damaged(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    bundle = Path(shutil.copytree(embedded_model(), tmp_path / "bundle"))
    damage(bundle)

    assert assemble_arrays(spec_of(model=str(bundle))) is None


def test_torch_tells_of_damaged_scales(tmp_path: Path) -> None:
    bundle = quantise_bundle(QuantiseJob(out=str(tmp_path / "bundle"), precision="int8"))
    edit_tensors(lambda tensors: tensors["head.weight_scale"].zero_())(bundle)

    assert assemble_arrays(spec_of(model=str(bundle))) is None
