"""Dtype `auto` is the device's best one, or a 16-bit type if float32 does not fit into the device's memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_adapter.app.models.number_formats import DtypeChoice, ModelSizes
from llama_adapter.app.models.random_model import LLAMA_SIZES, decoder_config
from llama_adapter.app.models.sketch import expected_forms
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.memory_plan import MemoryPlan, check_memory, planner
from llama_adapter.runtime.devices import EAGER, Capabilities
from llama_adapter.runtime.devices.npu_operators import family_of
from llama_adapter.runtime.errors import DeviceError

SEVEN, SMALL = decoder_config(LLAMA_SIZES["7B"]), decoder_config(LLAMA_SIZES["tiny"])
CLIP_WEIGHTS = 304_000_000
CARD = 21_534 * 10**6 - 1_074 * 10**6  # free bytes on the guide's 310P3, according to its `npu-smi info`


def device(capabilities: Capabilities, *, free: int | None = None, packs: bool = True) -> Any:
    """A device with this number of free bytes; None if it is unknown."""
    return SimpleNamespace(
        capabilities=capabilities,
        name="toy:0",
        device=torch.device("privateuseone", 0),
        free_bytes=lambda: free,
        computes_in=lambda precision, activations, *, wanted: packs,
    )


def chosen(
    capabilities: Capabilities,
    sizes: ModelSizes,
    *,
    free: int | None = None,
    packs: bool = True,
    encoder: str | None = None,
    **given: Any,
) -> str:
    backend = device(capabilities, free=free, packs=packs)
    choice = DtypeChoice(CaptionerSpec(batch_size=5, encoder=encoder, **given), backend=backend, mode=EAGER)
    dtype = str(choice(sizes)).removeprefix("torch.")
    assert bool(choice.reason) == ("dtype" not in given)
    return dtype


def sizes(decoder: Any = SEVEN, *, encoder: int = CLIP_WEIGHTS, precision: Any = "float") -> ModelSizes:
    return ModelSizes(decoder=decoder, num_encoder_weights=encoder, precision=precision)


@pytest.mark.parametrize(
    ("soc_version", "dtype"),
    [(202, "float16"), (100, "float16"), (222, "bfloat16"), (255, "bfloat16"), (999, "float16")],
)
def test_a_chip_computes_in_bfloat16_where_it_has_that(soc_version: int, dtype: str) -> None:
    capabilities = Capabilities(dtypes=family_of(soc_version).dtypes)

    assert [chosen(capabilities, sizes(decoder)) for decoder in (SEVEN, SMALL)] == [dtype] * 2


FAST = Capabilities(dtypes=("float32", "bfloat16", "float16"), large_dtype="bfloat16")
SLOW = Capabilities(dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize(
    ("capabilities", "model", "packs", "dtype"),
    [
        (FAST, sizes(), True, "bfloat16"),
        (FAST, sizes(SMALL), True, "bfloat16"),  # its encoder is large
        (FAST, sizes(SMALL, encoder=3_000_000), True, "float32"),
        (SLOW, sizes(), True, "float32"),
        (FAST, sizes(precision="int8"), True, "float32"),
        (FAST, sizes(precision="int8"), False, "bfloat16"),  # weights that are widened count as floats
    ],
)
def test_half_types_of_a_processor_are_for_large_models(
    capabilities: Capabilities, model: ModelSizes, packs: bool, dtype: str
) -> None:
    assert chosen(capabilities, model, packs=packs) == dtype


def test_a_given_dtype_is_taken_or_refused() -> None:
    assert chosen(FAST, sizes(), dtype="float32", free=0) == "float32"
    with pytest.raises(DeviceError) as caught:
        chosen(Capabilities(dtypes=("float16", "float32")), sizes(), dtype="bfloat16")
    assert "float16" in caught.value.hint


def test_a_half_type_is_taken_where_float32_does_not_fit() -> None:
    def taken(free: int | None, capabilities: Capabilities = SLOW) -> str:
        return chosen(capabilities, sizes(), free=free)

    assert taken(None) == taken(100 * 10**9) == "float32"
    assert taken(20 * 10**9) == "bfloat16"
    assert taken(10**9) == "float32"  # nothing fits, so the memory check reports the better type
    assert taken(20 * 10**9, Capabilities(dtypes=("float32", "float16"))) == "float16"


def test_the_guides_model_and_batch_fit_into_the_guides_card(tmp_path: Path) -> None:
    om = tmp_path / "clip.om"
    om.write_bytes(b"")
    capabilities = Capabilities(dtypes=family_of(202).dtypes, static_shapes=True, runs_om=True)
    card = device(capabilities, free=CARD)

    def planned(name: str) -> tuple[MemoryPlan, EngineConfig]:
        dtype = getattr(torch, name)
        forms = expected_forms(SEVEN, dtype=dtype)
        config = EngineConfig(decoder=SEVEN, dtype=dtype, num_slots=5)
        return planner(config, forms, backend=card)(5), config

    dtype = chosen(capabilities, sizes(), encoder=str(om), free=CARD)
    (single, _), (half, config) = planned("float32"), planned(dtype)

    assert dtype == "float16"
    # With the least cache, 1,024 places: one row of 512 tokens, and a quarter of them in each of the other four.
    assert single.total / 1e9 == pytest.approx(28.8, abs=0.1)
    assert half.total / 1e9 == pytest.approx(14.6, abs=0.1)
    check_memory(half, config, free=CARD, device="npu:0")
    with pytest.raises(DeviceError):
        check_memory(single, config, free=CARD, device="npu:0")
