"""Memory and work of a step, predicted from shapes, equal those of a real step."""

import dataclasses
import json
from functools import cache

import pytest
import torch

from llama_adapter.app.learning.training import plan as module
from llama_adapter.app.learning.training.job import ParameterSet, TrainingChoice
from llama_adapter.app.learning.training.model import open_trainable
from llama_adapter.app.learning.training.plan import MetaCounter, Shapes, plan_step, require_memory, smaller
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.training.frozen import PackedWeight, find_kernels, packed_bytes
from llama_adapter.llm.training.layout import IGNORED
from llama_adapter.llm.training.linear import AdaptedLinear
from llama_adapter.llm.training.sketch import frozen_weights
from llama_adapter.runtime.errors import TooLittleMemoryError
from llama_adapter.runtime.kernels.library import find_library
from tests.app.command import Run
from tests.app.golden import ROOT, model_options

ROWS, TOKENS, LABELS = 4, 48, 12
TINY = CaptionerSpec(**model_options("BIAS-TINY"))


@cache
def counted(sets: tuple[ParameterSet, ...], *, checkpointing: bool) -> tuple[MetaCounter, Shapes, int, int]:
    """Count a real step of the tiny model. Also returns its shapes, and the bytes of frozen and of trained weights."""
    choice = TrainingChoice(sets=sets)
    model = open_trainable(TINY, choice, dtype=torch.float32, device="cpu", seed=0)
    model.decoder.checkpoint_layers = checkpointing
    tokens_BS = torch.randint(3, 500, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    labels_BS = tokens_BS.clone()
    labels_BS[:, : TOKENS - LABELS] = IGNORED
    encoded = model.encode_nothing().expand(ROWS, -1, -1).clone()
    with MetaCounter(frozen_weights(model.decoder)) as counter:
        loss, _ = model(tokens_BS, labels_BS, encoded)
        loss.backward()
    of_model = {"decoder": model.decoder_config, "vision": model.vision_config, "dtype": torch.float32}
    of_step = {"rows": ROWS, "tokens": TOKENS, "labels": LABELS, "checkpointing": checkpointing}
    shapes = Shapes(kinds=choice.kinds, lora_rank=choice.lora_rank, **of_model, **of_step)
    trained = sum(one.nbytes for one in model.trained().values())
    return counter, shapes, sum(one.nbytes for one in model.parameters()) - trained, trained


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sets", [("bias",), ("bias", "lora"), ("visual",)])
def test_the_plan_is_what_a_real_step_takes(sets: tuple[ParameterSet, ...], checkpointing: bool) -> None:
    counter, shapes, frozen, trained = counted(sets, checkpointing=checkpointing)
    plan = plan_step(shapes)

    assert plan.computing == pytest.approx(counter.peak_bytes, rel=0.1)
    assert plan.flops == pytest.approx(counter.flops, rel=0.05)
    assert 0 < plan.frozen_flops == pytest.approx(counter.frozen_flops, rel=0.05)
    assert plan.seconds(flops_per_s=1, frozen_flops_per_s=2, bytes_per_s=4) == pytest.approx(
        plan.flops - plan.frozen_flops / 2 + plan.traffic / 4
    )
    assert plan.trained == pytest.approx(3 * trained, rel=0.05), "weights and two moments"
    assert plan.frozen - trained == pytest.approx(frozen, rel=0.1), "and the adapter as it was"


@pytest.mark.slow
def test_smaller_parts_checkpoints_and_more_devices_take_less() -> None:
    choice = TrainingChoice(sets=("bias", "lora"))
    _, shapes, _, _ = counted(choice.sets, checkpointing=False)
    # Long enough for a step to take more memory than encoding its pictures.
    shapes = dataclasses.replace(shapes, rows=16, tokens=96, device_type="cuda")
    whole = plan_step(shapes)
    eighth = smaller(shapes, num_ranks=8, batch_size=16, rows=None)

    assert (eighth.rows, eighth.parts) == (2, 1)
    assert plan_step(smaller(shapes, num_ranks=1, batch_size=16, rows=4)).computing < 0.5 * whole.computing
    assert plan_step(smaller(shapes, num_ranks=1, batch_size=16, rows=4)).flops == pytest.approx(whole.flops, rel=0.02)
    assert plan_step(dataclasses.replace(shapes, checkpointing=True)).computing < whole.computing
    divided = plan_step(eighth, num_ranks=8, kind="fsdp")
    plans = (divided, plan_step(eighth, num_ranks=8), whole)
    of_divided, of_shared, of_whole = (dataclasses.replace(one, scoring=0).total for one in plans)
    assert of_divided < of_shared < of_whole
    assert divided.trained == whole.trained // 8


@pytest.mark.slow
def test_many_rows_are_planned_by_few() -> None:
    """Beyond 64 rows the memory is extrapolated linearly; here it is compared with the real count for 96."""
    _, shapes, _, _ = counted(("bias",), checkpointing=False)
    planned = plan_step(dataclasses.replace(shapes, rows=96))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_COUNTED_ROWS", 96)
        module._computed.cache_clear()
        whole = plan_step(dataclasses.replace(shapes, rows=96))
    module._computed.cache_clear()

    assert planned.computing == pytest.approx(whole.computing, rel=0.01)
    assert (planned.flops, planned.traffic) == pytest.approx((whole.flops, whole.traffic), rel=0.01)
    assert plan_step(dataclasses.replace(shapes, rows=2 * 10**9)).computing > 10**6 * whole.computing


def test_a_model_that_does_not_fit_is_refused_with_a_sentence() -> None:
    _, shapes, _, _ = counted(("bias",), checkpointing=False)
    plan = plan_step(shapes)

    require_memory(plan, free=plan.total, device="cpu")
    require_memory(plan, free=None, device="cpu")
    with pytest.raises(TooLittleMemoryError, match=r"Training needs 0\.12 GB at its peak .* are free on cpu"):
        require_memory(plan, free=plan.total - 1, device="cpu")


@pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels")
def test_weights_are_packed_where_memory_allows_it() -> None:
    choice = TrainingChoice(sets=("bias",))
    kernels = find_kernels("cpu", torch.float32)
    _, shapes, _, _ = counted(choice.sets, checkpointing=False)
    plan = plan_step(shapes)
    model = open_trainable(TINY, choice, dtype=torch.float32, device="cpu", seed=0, kernels=kernels)
    layers = [layer for layer in model.decoder.modules() if isinstance(layer, AdaptedLinear)]
    weights = [layer.weight for layer in layers if isinstance(layer.weight, PackedWeight)]

    assert len(weights) == len(layers) == 4 * shapes.decoder.num_layers + 1, "and the head"
    assert plan.packing == sum(packed_bytes(one.shape, one.dtype) - 4 * one.shape.numel() for one in weights)
    assert plan.packed().total == plan.total + plan.packing
    model.release()
    assert not any(hasattr(layer, "weight") for layer in layers)


@pytest.mark.slow
def test_7b_is_planned_without_a_model(run: Run) -> None:
    """The command is that of the page."""
    page = (ROOT / "docs" / "training-memory.md").read_text(encoding="utf-8")
    command = page.partition("```bash\nllama-adapter ")[2].partition("\n")[0]
    ran = run(command.split(), "--json")
    assert ran.code == 0, ran.err
    plans = json.loads(ran.out)["plans"]

    assert [(one["devices"], one["parallel"], one["rows"]) for one in plans] == [
        (1, "", 16),
        (8, "ddp", 2),
        (8, "fsdp", 2),
    ]
    assert 13.4e9 < plans[0]["frozen"] < 14.5e9, "6.7 billion numbers and CLIP, of 2 bytes"
    assert plans[0]["trained"] == pytest.approx(3 * 4 * 63_095_552, rel=0.02), "the released BIAS-7B"
    assert 1.6 * plans[0]["flops"] > 4 * 6.7e9 * 16 * 512, "at least two passes over all weights"
    assert plans[0]["seconds"] == pytest.approx(plans[0]["flops"] / 4e14 + plans[0]["traffic"] / 2e12)
    for one in plans:
        gigabytes = " | ".join(f"{one[part] / 1e9:.2f}" for part in ("frozen", "trained", "computing", "peak"))
        assert f" {one['rows']} | {gigabytes} | {one['seconds']:.2f} |" in page
    refused = run("train", "--plan", "7X")
    assert refused.code == 2
    assert "7X" in refused.err
